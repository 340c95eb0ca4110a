"""Function templates over numbers and text. :mod:`steelyard.environments.repair.template` has the notation."""

from steelyard.environments.repair.template import Template

NUMBERS: tuple[Template, ...] = (
    Template(
        name="factorial",
        doc="product of the numbers 1 to {n}",
        args=(("n", "count"),),
        source="""\
t = 1
for i in range(1, n + 1):
 t *= i
return t
""",
    ),
    Template(
        name="sum_range",
        doc="sum of the numbers {a} to {b}, both included",
        args=(("a", "small"), ("b", "upper")),
        source="""\
t = 0
for i in range(a, b + 1):
 t += i
return t
""",
    ),
    Template(
        name="digit_sum",
        doc="sum of the digits of {n}",
        args=(("n", "large"),),
        source="""\
t = 0
while n > 0:
 t += n % 10
 n //= 10
return t
""",
    ),
    Template(
        name="count_divisors",
        doc="number of divisors of {n}",
        args=(("n", "positive"),),
        source="""\
t = 0
for i in range(1, n + 1):
 if n % i == 0:
  t += 1
return t
""",
    ),
    Template(
        name="power",
        doc="{a} to the power {n}",
        args=(("a", "small"), ("n", "small")),
        source="""\
t = 1
for i in range(n):
 t *= a
return t
""",
    ),
    Template(
        name="clamp",
        doc="{n} limited to {K} to {M}",
        args=(("n", "int"),),
        constants=(("K", 1, 3), ("M", 5, 8)),
        source="""\
if n < K:
 return K
if n > M:
 return M
return n
""",
    ),
    Template(
        name="distance",
        doc="distance between {a} and {b}",
        args=(("a", "int"), ("b", "int")),
        source="""\
if a > b:
 return a - b
return b - a
""",
    ),
    Template(
        name="price",
        doc="{n} times {K}, minus {M} if {n} is above 5",
        args=(("n", "int"),),
        constants=(("K", 3, 6), ("M", 1, 4)),
        source="""\
t = n * K
if n > 5:
 t -= M
return t
""",
    ),
    Template(
        name="multiples",
        doc="the first {n} multiples of {K}",
        args=(("n", "count"),),
        constants=(("K", 2, 6),),
        source="""\
out = []
for i in range(n):
 out.append((i + 1) * K)
return out
""",
    ),
    Template(
        name="countdown",
        doc="the numbers {n} down to 1",
        args=(("n", "count"),),
        source="""\
out = []
while n > 0:
 out.append(n)
 n -= 1
return out
""",
    ),
)

TEXTS: tuple[Template, ...] = (
    Template(
        name="count_letter",
        doc="number of {C} in {s}",
        args=(("s", "text"),),
        letters=("C",),
        source="""\
t = 0
for c in s:
 if c == C:
  t += 1
return t
""",
    ),
    Template(
        name="remove_letter",
        doc="{s} without {C}",
        args=(("s", "text"),),
        letters=("C",),
        source="""\
out = ''
for c in s:
 if c != C:
  out += c
return out
""",
    ),
    Template(
        name="reverse_text",
        doc="{s} spelled backwards",
        args=(("s", "text"),),
        source="""\
out = ''
for c in s:
 out = c + out
return out
""",
    ),
    Template(
        name="repeat_letters",
        doc="{s} with each letter {K} times",
        args=(("s", "text"),),
        constants=(("K", 2, 4),),
        source="""\
out = ''
for c in s:
 out += c * K
return out
""",
    ),
    Template(
        name="count_long",
        doc="number of words in {ws} longer than {K}",
        args=(("ws", "words"),),
        constants=(("K", 1, 3),),
        source="""\
t = 0
for w in ws:
 if len(w) > K:
  t += 1
return t
""",
    ),
    Template(
        name="initials",
        doc="first letters of {ws} as one text",
        args=(("ws", "words"),),
        source="""\
out = ''
for w in ws:
 out += w[0]
return out
""",
    ),
    Template(
        name="total_length",
        doc="number of letters in all of {ws}",
        args=(("ws", "words"),),
        source="""\
t = 0
for w in ws:
 t += len(w)
return t
""",
    ),
    Template(
        name="starting_with",
        doc="words of {ws} that start with {C}",
        args=(("ws", "words"),),
        letters=("C",),
        source="""\
out = []
for w in ws:
 if w.startswith(C):
  out.append(w)
return out
""",
    ),
)

RELATIVES: tuple[Template, ...] = (
    Template(
        name="sum_below",
        doc="sum of the items of {xs} below {K}",
        args=(("xs", "ints"),),
        constants=(("K", 3, 7),),
        source="""\
t = 0
for x in xs:
 if x < K:
  t += x
return t
""",
    ),
    Template(
        name="smallest",
        doc="smallest item of {xs}",
        args=(("xs", "ints1"),),
        source="""\
best = xs[0]
for x in xs:
 if x < best:
  best = x
return best
""",
    ),
    Template(
        name="count_divisible",
        doc="number of items of {xs} divisible by {K}",
        args=(("xs", "ints"),),
        constants=(("K", 2, 4),),
        source="""\
t = 0
for x in xs:
 if x % K == 0:
  t += 1
return t
""",
    ),
    Template(
        name="keep_above",
        doc="items of {xs} above {K}",
        args=(("xs", "ints"),),
        constants=(("K", 2, 6),),
        source="""\
out = []
for x in xs:
 if x > K:
  out.append(x)
return out
""",
    ),
    Template(
        name="all_above",
        doc="whether all items of {xs} are above {K}",
        args=(("xs", "ints"),),
        constants=(("K", 0, 3),),
        source="""\
for x in xs:
 if x <= K:
  return False
return True
""",
    ),
    Template(
        name="sums_of_each",
        doc="sum of {xs} and {ys} at each position",
        args=(("xs", "three"), ("ys", "three")),
        source="""\
out = []
for x, y in zip(xs, ys):
 out.append(x + y)
return out
""",
    ),
    Template(
        name="count_digits",
        doc="number of digits of {n}",
        args=(("n", "large"),),
        source="""\
t = 0
while n > 0:
 t += 1
 n //= 10
return t
""",
    ),
    Template(
        name="longest_word",
        doc="the first longest word of {ws}, else ''",
        args=(("ws", "words"),),
        source="""\
best = ''
for w in ws:
 if len(w) > len(best):
  best = w
return best
""",
    ),
)
