"""Which of several variants is better, each tuned alike?"""
