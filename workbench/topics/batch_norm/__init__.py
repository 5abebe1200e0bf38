"""Do batch norm's statistics hold, over batches, devices and time?"""
