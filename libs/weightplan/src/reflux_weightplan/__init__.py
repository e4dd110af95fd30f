"""Plans of weight transfers as pure functions: layouts in, transfers, buckets and a schedule out. No I/O, no clock."""
