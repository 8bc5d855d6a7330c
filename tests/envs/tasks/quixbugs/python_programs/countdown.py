def countdown(x):
    while x > 1:
        yield x
        x -= 1


"""
All numbers from x down to 1.
"""
