-- Add to a counter that no script counts by itself.  ARGV  1 task  2 counter  3 how many

count(ARGV[1], ARGV[2], tonumber(ARGV[3]))
return 1
