def countdown(x):
    while x != 0:
        yield x


"""
All numbers from x down to 1.
"""
