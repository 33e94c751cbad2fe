from django.contrib import admin

from example_project.shop.models import Account, Catalogue, Entry, Feed, Order, Product, Total

admin.site.register([Account, Catalogue, Entry, Feed, Order, Product, Total])
