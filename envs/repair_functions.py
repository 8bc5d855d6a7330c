"""Thirty small functions, correct, with cases to call them with: what level 4 of `repair` breaks.

Invariant: each stands on its own, is pure, and takes and gives JSON values. Of its cases an agent sees the first three;
together they run every line.
"""

# ruff: noqa: RUF005, SIM102, SIM108
# mypy: disable-error-code="var-annotated"

from typing import Any


def binary_search(items, wanted):
    """The place of a value in a sorted list, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == wanted:
            return middle
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def caesar(text, shift):
    """Move each letter on by `shift` in the alphabet, from z back to a; everything else stays."""
    result = ""
    for character in text:
        if "a" <= character <= "z":
            result += chr((ord(character) - ord("a") + shift) % 26 + ord("a"))
        elif "A" <= character <= "Z":
            result += chr((ord(character) - ord("A") + shift) % 26 + ord("A"))
        else:
            result += character
    return result


def chunks(items, size):
    """Cut a list into lists of `size`; the last may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def collatz_steps(number):
    """How many steps of halving, or tripling and adding one, lead to 1."""
    steps = 0
    while number != 1:
        if number % 2 == 0:
            number = number // 2
        else:
            number = 3 * number + 1
        steps += 1
    return steps


def common_prefix(words):
    """The longest beginning that all words share."""
    if not words:
        return ""
    shortest = min(words, key=len)
    for place, letter in enumerate(shortest):
        if any(word[place] != letter for word in words):
            return shortest[:place]
    return shortest


def count_words(text):
    """How often each word occurs, whatever its case."""
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def digital_root(number):
    """The sum of the digits, and of the digits of that sum, until one digit is left."""
    while number > 9:
        total = 0
        while number > 0:
            total += number % 10
            number = number // 10
        number = total
    return number


def edit_distance(first, second):
    """How many letters must be inserted, removed or replaced to turn one word into the other."""
    above = list(range(len(second) + 1))
    for row, a in enumerate(first, 1):
        current = [row]
        for column, b in enumerate(second, 1):
            cost = 0 if a == b else 1
            current.append(min(above[column] + 1, current[-1] + 1, above[column - 1] + cost))
        above = current
    return above[-1]


def flatten(nested):
    """All values of lists in lists, in order."""
    flat = []
    for item in nested:
        if isinstance(item, list):
            flat.extend(flatten(item))
        else:
            flat.append(item)
    return flat


def from_roman(text):
    """The number that a Roman numeral stands for."""
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    for place, letter in enumerate(text):
        value = values[letter]
        if place + 1 < len(text) and value < values[text[place + 1]]:
            total -= value
        else:
            total += value
    return total


def greatest_divisor(a, b):
    """The greatest number that divides both."""
    while b != 0:
        a, b = b, a % b
    return a


def insert_sorted(items, value):
    """A sorted list with one more value, still sorted."""
    place = 0
    while place < len(items) and items[place] < value:
        place += 1
    return items[:place] + [value] + items[place:]


def is_balanced(text):
    """Whether every bracket is closed by its own kind, in order."""
    closing = {")": "(", "]": "[", "}": "{"}
    open_ones = []
    for character in text:
        if character in "([{":
            open_ones.append(character)
        elif character in closing:
            if not open_ones or open_ones.pop() != closing[character]:
                return False
    return not open_ones


def is_leap(year):
    """Whether a year of the Gregorian calendar has a 29th of February."""
    if year % 400 == 0:
        return True
    return year % 4 == 0 and year % 100 != 0


def longest_run(items):
    """The length of the longest stretch of equal neighbours."""
    longest = current = 0
    for place, item in enumerate(items):
        if place > 0 and item == items[place - 1]:
            current += 1
        else:
            current = 1
        longest = max(longest, current)
    return longest


def median(numbers):
    """The middle of the sorted numbers; of an even count, the mean of the two middle ones."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def merge_intervals(intervals):
    """Join intervals that overlap or touch; sorted by where they begin."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def merge_sorted(first, second):
    """One sorted list from two."""
    merged = []
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i] <= second[j]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return merged + first[i:] + second[j:]


def pascal_row(number):
    """A row of Pascal's triangle; row 0 is [1]."""
    row = [1]
    for _ in range(number):
        row = [1] + [row[i] + row[i + 1] for i in range(len(row) - 1)] + [1]
    return row


def primes(limit):
    """All primes below a limit."""
    found = []
    for number in range(2, limit):
        if all(number % prime != 0 for prime in found):
            found.append(number)
    return found


def rotate(items, steps):
    """Move every item to the right by some steps; what leaves at the end comes in at the start."""
    if not items:
        return []
    cut = len(items) - steps % len(items)
    return items[cut:] + items[:cut]


def run_lengths(text):
    """Each stretch of one character with its length: "aab" is [["a", 2], ["b", 1]]."""
    runs = []
    for character in text:
        if runs and runs[-1][0] == character:
            runs[-1][1] += 1
        else:
            runs.append([character, 1])
    return runs


def running_max(numbers):
    """At each place the largest number so far."""
    result = []
    for number in numbers:
        if not result or number > result[-1]:
            result.append(number)
        else:
            result.append(result[-1])
    return result


def second_largest(numbers):
    """The largest number but one, counting equal ones once; None if there is none."""
    largest = second = None
    for number in numbers:
        if largest is None or number > largest:
            largest, second = number, largest
        elif number != largest and (second is None or number > second):
            second = number
    return second


def title_case(text):
    """Each word with a capital first letter and small ones after it."""
    return " ".join(word[:1].upper() + word[1:].lower() for word in text.split())


def to_base(number, base):
    """A number's digits in a base up to 16, as text."""
    if number == 0:
        return "0"
    digits = ""
    rest = abs(number)
    while rest > 0:
        digits = "0123456789abcdef"[rest % base] + digits
        rest = rest // base
    return "-" + digits if number < 0 else digits


def to_roman(number):
    """A number below 40 as a Roman numeral."""
    result = ""
    for value, letters in [(10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]:
        while number >= value:
            result += letters
            number -= value
    return result


def transpose(rows):
    """Rows become columns; what is missing in a short row is None."""
    width = max((len(row) for row in rows), default=0)
    return [[row[column] if column < len(row) else None for row in rows] for column in range(width)]


def window_sums(numbers, size):
    """The sums of all `size` neighbours."""
    sums = []
    for start in range(len(numbers) - size + 1):
        sums.append(sum(numbers[start : start + size]))
    return sums


def wrap(text, width):
    """Break a text into lines of at most `width` characters between its words."""
    lines = []
    current = ""
    for word in text.split():
        if current and len(current) + 1 + len(word) > width:
            lines.append(current)
            current = word
        else:
            current = current + " " + word if current else word
    if current:
        lines.append(current)
    return lines


CASES: dict[str, list[list[Any]]] = {
    "binary_search": [[[1, 3, 5, 7], 5], [[1, 3, 5, 7], 1], [[2, 4], 3], [[], 1], [[4], 4], [[1, 2, 8, 9, 11], 11]],
    "caesar": [["abc xyz", 3], ["Hello, Zoe!", 1], ["az AZ", -1], ["", 5], ["aAzZ09", 27], ["Mnop", 13]],
    "chunks": [[[1, 2, 3, 4, 5], 2], [[1, 2, 3], 3], [[1, 2], 1], [[], 2], [[1, 2, 3, 4, 5, 6, 7], 3], [[9], 5]],
    "collatz_steps": [[6], [1], [7], [2], [27], [16]],
    "common_prefix": [
        [["flower", "flow", "flight"]],
        [["car", "car"]],
        [["dog", "cat"]],
        [[]],
        [["a"]],
        [["ab", "abc"]],
    ],
    "count_words": [["the cat the dog"], ["One one ONE two"], [""], ["a b c"], [" x  x "], ["To be or not to be"]],
    "digital_root": [[942], [7], [99], [0], [10], [493193]],
    "edit_distance": [["kitten", "sitting"], ["abc", "ab"], ["", "xy"], ["same", "same"], ["abc", ""], ["ab", "ba"]],
    "flatten": [[[1, [2, [3]], 4]], [[[], [1]]], [[1, 2]], [[]], [[[[[5]]], 6]], [[["a"], "b", [["c"]]]]],
    "from_roman": [["XIV"], ["III"], ["MCMXCIV"], ["IX"], ["LVIII"], ["CD"]],
    "greatest_divisor": [[12, 18], [7, 3], [10, 5], [0, 4], [81, 27], [100, 75]],
    "insert_sorted": [[[1, 3, 5], 4], [[1, 2], 0], [[1, 2], 9], [[], 1], [[1, 3, 5], 3], [[2, 2], 2]],
    "is_balanced": [["(a[b]{c})"], ["(]"], ["(("], [""], ["}"], ["([)]"]],
    "is_leap": [[2024], [1900], [2000], [2023], [2100], [1600]],
    "longest_run": [[[1, 1, 2, 2, 2, 3]], [[5]], [[]], [[1, 2, 3]], [[4, 4]], [[1, 1, 1, 2, 1]]],
    "median": [[[3, 1, 2]], [[4, 1, 3, 2]], [[5]], [[1, 2]], [[9, 9, 1, 5, 7]], [[10, -10, 0, 4]]],
    "merge_intervals": [
        [[[1, 3], [2, 6], [8, 9]]],
        [[[1, 2], [2, 3]]],
        [[[5, 6], [1, 2]]],
        [[]],
        [[[1, 9], [2, 3]]],
        [[[1, 2], [4, 5]]],
    ],
    "merge_sorted": [
        [[1, 4], [2, 3]],
        [[], [1]],
        [[1, 2], []],
        [[1, 1], [1]],
        [[5, 6], [1, 2]],
        [[1, 3, 5], [2, 4, 6]],
    ],
    "pascal_row": [[4], [0], [2], [1], [5], [6]],
    "primes": [[12], [3], [2], [0], [30], [14]],
    "rotate": [[[1, 2, 3, 4], 1], [[1, 2, 3], 5], [[], 2], [[1, 2], 0], [[1, 2, 3, 4], -1], [[7], 3]],
    "run_lengths": [["aabccc"], ["a"], [""], ["abab"], ["zzzz"], ["aab b"]],
    "running_max": [[[1, 3, 2, 5, 4]], [[-2, -3]], [[]], [[1]], [[2, 2, 3]], [[5, 4, 3]]],
    "second_largest": [[[1, 5, 3, 4]], [[5, 5, 2]], [[1]], [[]], [[2, 1]], [[-1, -2, -3]]],
    "title_case": [["hello big world"], ["mIXED cASE"], [""], ["a b"], ["  two   spaces "], ["x1 y2"]],
    "to_base": [[10, 2], [255, 16], [-7, 3], [0, 2], [8, 8], [100, 7]],
    "to_roman": [[14], [9], [3], [1], [27], [39]],
    "transpose": [[[[1, 2], [3, 4]]], [[[1, 2, 3], [4]]], [[]], [[[1]]], [[[1], [2, 3]]], [[["a", "b"]]]],
    "window_sums": [[[1, 2, 3, 4], 2], [[5, 6], 1], [[1, 2], 3], [[], 1], [[1, 2, 3], 3], [[4, -4, 4, -4], 3]],
    "wrap": [["the quick brown fox", 10], ["a b c", 3], ["word", 2], ["", 5], ["aa bb cc dd", 5], ["one two", 7]],
}
"""Arguments by function."""
