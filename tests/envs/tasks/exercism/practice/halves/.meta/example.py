def halve(numbers):
    if any(number % 2 for number in numbers):
        raise ValueError("odd numbers have no half")
    return [number // 2 for number in numbers]
