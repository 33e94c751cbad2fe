#!/usr/bin/env python
import os
import sys
from pathlib import Path

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    # Started as a script, Python puts this folder on the path, not the one that holds the package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    execute_from_command_line(sys.argv)
