"""Is the workload in order before anything is trained?"""
