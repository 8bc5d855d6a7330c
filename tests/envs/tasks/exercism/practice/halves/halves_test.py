import unittest

import pytest
from halves import halve


class HalvesTest(unittest.TestCase):
    @pytest.mark.task(taskno=1)
    def test_even_numbers(self):
        for given, wanted in [([], []), ([2, 8], [1, 4])]:
            with self.subTest(given=given):
                self.assertEqual(halve(given), wanted)

    def test_odd_number(self):
        with self.assertRaisesRegex(ValueError, "no half"):
            halve([2, 3])
