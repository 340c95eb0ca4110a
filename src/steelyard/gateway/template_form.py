"""Whether a template writes each message by itself, told from its syntax.

Such a template is a head, one loop over the messages, and a foot::

    text(m0 m1 ... mn) = head(m0, tools) + body(m0) + body(m1) + ... + body(mn) + foot

So what a conversation adds to its text can be rendered without the conversation before it. That is no guess from
examples: the loop's body may read the message, constants and what it has set itself, and nothing else; the head may
read of the messages the first one only, and whether there are any; the foot may read none, and asks for the reply.
Whatever the syntax does not show to be so counts as not so: a counter of the loop, a namespace, a macro, a look at
another message.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from jinja2 import nodes

_MESSAGES = "messages"
_ASKS = "add_generation_prompt"
_GIVEN = frozenset((_MESSAGES, _ASKS, "tools", "documents"))
_IMPURE_FILTERS = frozenset(("random",))
_PURE = (
    nodes.Output,
    nodes.TemplateData,
    nodes.If,
    nodes.For,
    nodes.Assign,
    nodes.Name,
    nodes.Const,
    nodes.Tuple,
    nodes.List,
    nodes.Dict,
    nodes.Pair,
    nodes.Keyword,
    nodes.CondExpr,
    nodes.Filter,
    nodes.Test,
    nodes.Getitem,
    nodes.Getattr,
    nodes.Slice,
    nodes.Concat,
    nodes.Compare,
    nodes.Operand,
    nodes.Call,
    nodes.BinExpr,
    nodes.UnaryExpr,
)


def writes_each_alone(template: nodes.Template, constant_names: Collection[str]) -> bool:
    """Whether ``template`` is of this form.

    Args:
        constant_names: variables that are the same in every rendering, such as ``bos_token``.
    """
    constant = frozenset((*constant_names, "raise_exception"))
    body = template.body
    rests = {_MESSAGES, *_names_of_rests(body)}
    places = [place for place, node in enumerate(body) if isinstance(node, nodes.For) and _is_over(node, rests)]
    if len(places) != 1 or not all(_is_pure(node) for node in template.body):
        return False
    (place,) = places
    loop = body[place]
    assert isinstance(loop, nodes.For)
    head, foot = body[:place], body[place + 1 :]
    set_outside = frozenset(_stored((*head, *foot), with_loops=False))
    return (
        _is_body_alone(loop, constant, set_outside)
        and all(_sees_first_only(node, rests) for node in head)
        and _ASKS not in {part.name for node in head for part in _parts(node) if isinstance(part, nodes.Name)}
        and _reads_only(foot, constant | {_ASKS})
    )


def _is_pure(node: nodes.Node) -> bool:
    """Whether it is made of expressions, conditions, loops and plain assignments only."""
    return all(
        isinstance(part, _PURE) and not (isinstance(part, nodes.Filter) and part.name in _IMPURE_FILTERS)
        for part in _parts(node)
    )


def _is_over(loop: nodes.For, rests: Collection[str]) -> bool:
    return isinstance(loop.iter, nodes.Name) and loop.iter.name in rests


def _names_of_rests(body: Sequence[nodes.Node]) -> Iterator[str]:
    """Variables that are set, once, to the messages, or to those after the first."""
    stored = list(_stored(body))
    for node in body:
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            name = node.target.name
            if stored.count(name) == 1 and name != _MESSAGES and _is_rest(node.node):
                yield name


def _is_rest(expression: nodes.Node | None) -> bool:
    """Whether it grows by a message where the messages, of which there is one at least, do so."""
    match expression:
        case nodes.Name(name=name):
            return bool(name == _MESSAGES)
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Slice(start=start, stop=None, step=None)):
            return name == _MESSAGES and isinstance(start, nodes.Const) and start.value in (0, 1)
        case nodes.CondExpr(test=test, expr1=one, expr2=other):
            return _sees_first_only(test, (_MESSAGES,)) and _is_rest(one) and _is_rest(other)
        case _:
            return False


def _is_body_alone(loop: nodes.For, constant: frozenset[str], set_outside: frozenset[str]) -> bool:
    target = loop.target
    if not isinstance(target, nodes.Name) or loop.test is not None or loop.else_ or loop.recursive:
        return False
    own = frozenset(_stored(loop.body))
    taken = constant | set_outside | _GIVEN
    if own & (taken | {target.name}) or target.name in taken or any(map(_reads_loop, loop.body)):
        return False
    return _reads_only(loop.body, constant | own | {target.name, "loop"})


def _reads_only(body: Iterable[nodes.Node], names: Collection[str]) -> bool:
    own = frozenset(_stored(body := tuple(body)))
    return all(
        part.name in names or part.name in own
        for node in body
        for part in _parts(node)
        if isinstance(part, nodes.Name) and part.ctx == "load"
    )


def _reads_loop(node: nodes.Node) -> bool:
    """Whether it reads the ``loop`` around it, and not one of its own."""
    if isinstance(node, nodes.Name):
        return bool(node.name == "loop")
    if isinstance(node, nodes.For):
        return any(part is not None and _reads_loop(part) for part in (node.iter, node.test, *node.else_))
    return any(map(_reads_loop, node.iter_child_nodes()))


def _sees_first_only(node: nodes.Node, rests: Collection[str]) -> bool:
    """Whether it sees of the messages only the first one, and whether there are any."""
    if isinstance(node, nodes.Name):
        return node.ctx != "load" or node.name not in rests
    if isinstance(node, nodes.Assign) and _is_rest(node.node):
        return True
    if isinstance(node, nodes.Getitem) and _is_messages(node.node):
        return isinstance(node.arg, nodes.Const) and node.arg.value == 0
    return all(_sees_first_only(part, rests) for part in node.iter_child_nodes() if not _is_asked_for(part, node))


def _is_asked_for(part: nodes.Node, within: nodes.Node) -> bool:
    """Whether ``part`` is the messages, of which ``within`` only asks whether there are any."""
    if not _is_messages(part):
        return False
    match within:
        case nodes.If(test=test) | nodes.CondExpr(test=test):
            return part is test
        case nodes.And(left=left):
            return part is left  # on the right they may become the value
        case _:
            return isinstance(within, nodes.Not)


def _is_messages(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == _MESSAGES and node.ctx == "load"


def _stored(body: Iterable[nodes.Node], *, with_loops: bool = True) -> Iterator[str]:
    """Names that are set in it; what a loop sets is gone after it."""
    for node in body:
        if isinstance(node, nodes.Name) and node.ctx != "load":
            yield node.name
        if with_loops or not isinstance(node, nodes.For):
            yield from _stored(node.iter_child_nodes(), with_loops=with_loops)


def _parts(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for part in node.iter_child_nodes():
        yield from _parts(part)
