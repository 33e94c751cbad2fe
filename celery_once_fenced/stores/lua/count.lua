-- Add one to a counter that no script counts by itself.  ARGV  1 task  2 counter

count(ARGV[1], ARGV[2])
return 1
