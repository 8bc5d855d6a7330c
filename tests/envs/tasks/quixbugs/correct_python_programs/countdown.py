def countdown(x):
    while x > 0:
        yield x
        x -= 1
