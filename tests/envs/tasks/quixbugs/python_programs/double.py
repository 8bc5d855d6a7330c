def double(x):
    return x + 2


"""
Input:
    x: a number

Output:
    twice the number
"""
