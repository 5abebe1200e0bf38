"""Start, join and secure a Ray cluster; memory that its processes on one machine share."""
