"""Function templates over lists. :mod:`steelyard.environments.repair.template` has the notation."""

from steelyard.environments.repair.template import Template

FOLDS: tuple[Template, ...] = (
    Template(
        name="sum_above",
        doc="sum of the items of {xs} above {K}",
        args=(("xs", "ints"),),
        constants=(("K", 2, 6),),
        source="""\
t = 0
for x in xs:
 if x > K:
  t += x
return t
""",
    ),
    Template(
        name="count_below",
        doc="number of items of {xs} below {K}",
        args=(("xs", "ints"),),
        constants=(("K", 3, 7),),
        source="""\
t = 0
for x in xs:
 if x < K:
  t += 1
return t
""",
    ),
    Template(
        name="count_equal",
        doc="number of items of {xs} equal to {K}",
        args=(("xs", "ints"),),
        constants=(("K", 1, 6),),
        source="""\
t = 0
for x in xs:
 if x == K:
  t += 1
return t
""",
    ),
    Template(
        name="sum_divisible",
        doc="sum of the items of {xs} divisible by {K}",
        args=(("xs", "ints"),),
        constants=(("K", 2, 4),),
        source="""\
t = 0
for x in xs:
 if x % K == 0:
  t += x
return t
""",
    ),
    Template(
        name="sum_times",
        doc="sum of {K} times each item of {xs}",
        args=(("xs", "ints"),),
        constants=(("K", 2, 6),),
        source="""\
t = 0
for x in xs:
 t += x * K
return t
""",
    ),
    Template(
        name="sum_squares",
        doc="sum of the squares of {xs}",
        args=(("xs", "ints"),),
        source="""\
t = 0
for x in xs:
 t += x * x
return t
""",
    ),
    Template(
        name="product_nonzero",
        doc="product of the items of {xs} that are not 0",
        args=(("xs", "ints"),),
        source="""\
t = 1
for x in xs:
 if x != 0:
  t *= x
return t
""",
    ),
    Template(
        name="average_floor",
        doc="mean of {xs} rounded down, 0 if empty",
        args=(("xs", "ints"),),
        source="""\
if not xs:
 return 0
t = 0
for x in xs:
 t += x
return t // len(xs)
""",
    ),
    Template(
        name="largest",
        doc="largest item of {xs}",
        args=(("xs", "ints1"),),
        source="""\
best = xs[0]
for x in xs:
 if x > best:
  best = x
return best
""",
    ),
    Template(
        name="smallest_above",
        doc="smallest item of {xs} above {K}, else -1",
        args=(("xs", "ints"),),
        constants=(("K", 1, 5),),
        source="""\
best = -1
for x in xs:
 if x > K:
  if best == -1 or x < best:
   best = x
return best
""",
    ),
    Template(
        name="index_of_largest",
        doc="position of the first largest item of {xs}",
        args=(("xs", "ints1"),),
        source="""\
best = 0
for i in range(len(xs)):
 if xs[i] > xs[best]:
  best = i
return best
""",
    ),
    Template(
        name="spread",
        doc="largest minus smallest item of {xs}",
        args=(("xs", "ints1"),),
        source="""\
lo = min(xs)
hi = max(xs)
return hi - lo
""",
    ),
    Template(
        name="dot",
        doc="sum of the products of {xs} and {ys} by position",
        args=(("xs", "three"), ("ys", "three")),
        source="""\
t = 0
for x, y in zip(xs, ys):
 t += x * y
return t
""",
    ),
    Template(
        name="alternating",
        doc="items of {xs} at even positions minus those at odd ones",
        args=(("xs", "ints"),),
        source="""\
t = 0
for i, x in enumerate(xs):
 if i % 2 == 0:
  t += x
 else:
  t -= x
return t
""",
    ),
    Template(
        name="capped_sum",
        doc="sum of {xs} where each item counts at most {K}",
        args=(("xs", "ints"),),
        constants=(("K", 3, 7),),
        source="""\
t = 0
for x in xs:
 t += min(x, K)
return t
""",
    ),
)

SEARCHES: tuple[Template, ...] = (
    Template(
        name="last_above",
        doc="last item of {xs} above {K}, else -1",
        args=(("xs", "ints"),),
        constants=(("K", 2, 6),),
        source="""\
best = -1
for x in xs:
 if x > K:
  best = x
return best
""",
    ),
    Template(
        name="first_position",
        doc="first position of {K} in {xs}, else -1",
        args=(("xs", "ints"),),
        constants=(("K", 1, 5),),
        source="""\
for i in range(len(xs)):
 if xs[i] == K:
  return i
return -1
""",
    ),
    Template(
        name="all_below",
        doc="whether all items of {xs} are below {K}",
        args=(("xs", "ints"),),
        constants=(("K", 5, 9),),
        source="""\
for x in xs:
 if x >= K:
  return False
return True
""",
    ),
    Template(
        name="any_equal",
        doc="whether any item of {xs} is {K}",
        args=(("xs", "ints"),),
        constants=(("K", 1, 6),),
        source="""\
for x in xs:
 if x == K:
  return True
return False
""",
    ),
    Template(
        name="is_sorted",
        doc="whether {xs} never goes down",
        args=(("xs", "rising"),),
        source="""\
for i in range(1, len(xs)):
 if xs[i] < xs[i - 1]:
  return False
return True
""",
    ),
    Template(
        name="count_rises",
        doc="number of items of {xs} above the one before",
        args=(("xs", "ints"),),
        source="""\
t = 0
for i in range(1, len(xs)):
 if xs[i] > xs[i - 1]:
  t += 1
return t
""",
    ),
    Template(
        name="same_count",
        doc="number of positions where {xs} and {ys} are equal",
        args=(("xs", "three"), ("ys", "three")),
        source="""\
t = 0
for x, y in zip(xs, ys):
 if x == y:
  t += 1
return t
""",
    ),
    Template(
        name="longest_run",
        doc="length of the longest run of {K} in {xs}",
        args=(("xs", "ints"),),
        constants=(("K", 1, 4),),
        source="""\
best = 0
t = 0
for x in xs:
 if x == K:
  t += 1
 else:
  t = 0
 best = max(best, t)
return best
""",
    ),
)

BUILDERS: tuple[Template, ...] = (
    Template(
        name="running_sum",
        doc="running sums of {xs}",
        args=(("xs", "ints"),),
        source="""\
t = 0
out = []
for x in xs:
 t += x
 out.append(t)
return out
""",
    ),
    Template(
        name="scaled",
        doc="each item of {xs} times {K}",
        args=(("xs", "ints"),),
        constants=(("K", 2, 6),),
        source="""\
out = []
for x in xs:
 out.append(x * K)
return out
""",
    ),
    Template(
        name="clipped",
        doc="{xs} with items above {K} set to {K}",
        args=(("xs", "ints"),),
        constants=(("K", 3, 7),),
        source="""\
out = []
for x in xs:
 if x > K:
  x = K
 out.append(x)
return out
""",
    ),
    Template(
        name="keep_between",
        doc="items of {xs} from {a} to {b}, both included",
        args=(("xs", "ints"), ("a", "small"), ("b", "upper")),
        source="""\
out = []
for x in xs:
 if x >= a and x <= b:
  out.append(x)
return out
""",
    ),
    Template(
        name="drop_divisible",
        doc="items of {xs} not divisible by {K}",
        args=(("xs", "ints"),),
        constants=(("K", 2, 4),),
        source="""\
out = []
for x in xs:
 if x % K != 0:
  out.append(x)
return out
""",
    ),
    Template(
        name="backwards",
        doc="{xs} in reverse order",
        args=(("xs", "ints"),),
        source="""\
out = []
for i in range(len(xs)):
 out.append(xs[-1 - i])
return out
""",
    ),
    Template(
        name="differences",
        doc="each item of {xs} minus the one before",
        args=(("xs", "ints"),),
        source="""\
out = []
for i in range(1, len(xs)):
 out.append(xs[i] - xs[i - 1])
return out
""",
    ),
    Template(
        name="add_position",
        doc="each item of {xs} plus its position",
        args=(("xs", "ints"),),
        source="""\
out = []
for i, x in enumerate(xs):
 out.append(x + i)
return out
""",
    ),
    Template(
        name="larger_of_each",
        doc="the larger item of {xs} and {ys} at each position",
        args=(("xs", "three"), ("ys", "three")),
        source="""\
out = []
for x, y in zip(xs, ys):
 out.append(max(x, y))
return out
""",
    ),
    Template(
        name="without_repeats",
        doc="{xs} without repeats, in order",
        args=(("xs", "ints"),),
        source="""\
out = []
for x in xs:
 if x not in out:
  out.append(x)
return out
""",
    ),
    Template(
        name="rotated",
        doc="{xs} with the first {K} items moved to the end",
        args=(("xs", "ints"),),
        constants=(("K", 1, 3),),
        source="""\
a = xs[:K]
b = xs[K:]
return b + a
""",
    ),
    Template(
        name="replaced",
        doc="{xs} with each {K} set to {M}",
        args=(("xs", "ints"),),
        constants=(("K", 1, 4), ("M", 5, 9)),
        source="""\
out = []
for x in xs:
 if x == K:
  out.append(M)
 else:
  out.append(x)
return out
""",
    ),
)
