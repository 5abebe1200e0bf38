"""What limits asynchronous training on parameter servers?"""
