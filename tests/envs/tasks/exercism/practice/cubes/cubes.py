def cube(x):
    pass
