"""Writes the C code of a kernel: its branches and loops, and the function that runs programs on threads."""

from collections.abc import Sequence

from fused_lwlr.kernels.native.c import ORDERS, PRELUDE, c_type
from fused_lwlr.kernels.native.lanes import Lanes
from fused_lwlr.kernels.native.ttir import Block, Operation, UnsupportedError, Value
from fused_lwlr.kernels.native.values import Array, Uniform

ATOMICS = {"add": "__atomic_fetch_add({0}, {1}, {order})", "exch": "__atomic_exchange_n({0}, {1}, {order})"}


class Writer(Lanes):
    """Writes the operations of a kernel in their order."""

    def block(self, block: Block) -> None:
        """Writes the operations of a block."""
        for operation in block.operations:
            self._operation(operation)
        self.flush()

    def _operation(self, op: Operation) -> None:
        scalar = not any(value.type.shape for value in (*op.operands, *op.results))
        after_loops = {
            "scf.if": self._if, "scf.while": self._while, "tt.atomic_rmw": self._atomic, "tt.reduce": self.reduce,
        }  # fmt: skip
        if op.name in after_loops:
            self.flush()
            after_loops[op.name](op)
        elif op.name in ("scf.yield", "scf.condition", "tt.reduce.return", "tt.return", "barrier"):
            self.flush()
        elif op.name == "tt.store" and scalar:
            self.flush()
            pointer, value, *mask = self.scalars(op.operands)
            self.line(f"{f'if ({mask[0]}) ' if mask else ''}*{pointer} = {value};")
        elif op.name == "tt.load" and scalar:
            pointer, *mask = self.scalars(op.operands)
            other = mask[1] if mask[1:] else "0"
            self.define(op.results[0], f"{mask[0]} ? *{pointer} : {other}" if mask else f"*{pointer}")
        elif not self.simplify(op):
            self.schedule(op)

    def _atomic(self, op: Operation) -> None:
        kind, order, _ = (part.strip() for part in op.text.split(",")[:3])
        pointer, value, mask = self.scalars(op.operands)
        element = op.results[0].type.element
        if order not in ORDERS or element not in ("i32", "i64") or kind not in ATOMICS:
            raise UnsupportedError(f"tt.atomic_rmw {op.text}")
        text = ATOMICS[kind].format(pointer, value, order=f"__ATOMIC_{order.upper()}")
        self.define(op.results[0], f"{mask} ? {text} : 0")

    def _if(self, op: Operation) -> None:
        names = []
        for value in op.results:
            if value.type.shape:
                names.append(self.targets.get(value) or self.array(value.type))
            else:
                names.append(self.variable(value.type.element))
        self.open(f"if ({self.scalar(op.operands[0])}) {{")
        first, second = op.blocks
        self._assigned(first, names)
        if second.operations:
            self.close()
            self.open("else {")
            self._assigned(second, names)
        self.close()
        for result, name in zip(op.results, names, strict=True):
            self.forms[result] = Array(name) if result.type.shape else Uniform(name)

    def _while(self, op: Operation) -> None:
        condition, body = op.blocks
        names = [self._carried(*pair) for pair in zip(op.operands, condition.arguments, strict=True)]
        *operations, scf_condition = condition.operations
        # the body takes the passed values, and the loop returns them at its end
        test, *passed = scf_condition.operands
        # a loop with an empty body waits for another program
        waits = all(each.name == "scf.yield" for each in body.operations)
        turns = self.variable("i64", "0") if waits else ""
        self.open("for (;;) {")
        for each in operations:
            self._operation(each)
        self.flush()
        self.line(f"if (!{self.scalar(test)}) break;")
        passed_forms = [self.forms[value] for value in passed]
        self.forms.update(zip(body.arguments, passed_forms, strict=True))
        if waits:
            self.line(f"if (wait(&{turns})) return 1;")
        self._assigned(body, names)
        self.close()
        self.forms.update(zip(op.results, passed_forms, strict=True))

    def _carried(self, start: Value, argument: Value) -> str:
        """Writes the variable or the array of a loop-carried value, and returns its name."""
        if argument.type.shape:
            name = self.array(argument.type)
            self._assign(start, name)
            self.forms[argument] = Array(name)
        else:
            name = self.variable(argument.type.element, self.scalar(start))
            self.forms[argument] = Uniform(name)
        return name

    def _assigned(self, body: Block, names: Sequence[str]) -> None:
        """Writes a branch or the body of a loop, which assigns its results to these variables and arrays."""
        self._target(body.results, names)
        self.block(body)
        new_scalars = {}
        for value, name in zip(body.results, names, strict=True):
            form = self.forms[value]
            if not value.type.shape:
                new_scalars[name] = self.variable(value.type.element, self.scalar(value))
            elif isinstance(form, Array) and form.name in names and form.name != name:
                raise UnsupportedError("tensors that a loop swaps")
            else:
                self._assign(value, name)
        # after all of them are computed, because they may depend on the old values of each other
        for name, text in new_scalars.items():
            self.line(f"{name} = {text};")

    def _assign(self, value: Value, name: str) -> None:
        """Writes the assignment of a tensor to an array."""
        if self.forms[value] != Array(name):
            self.line("LANES")
            element = self.element(value, "i", {})
            self.line(f"for (int64_t i = 0; i < {value.type.shape[0]}; i++) {name}[i] = {element};")

    def _target(self, results: Sequence[Value], names: Sequence[str]) -> None:
        """Makes loops write results of a block to these arrays directly, where the old elements are not needed.

        They are not needed if only the operations that compute the result read them, lane by lane. Copies of the arrays
        would take 10 to 30 % of a step with norms.
        """
        for value, name in zip(results, names, strict=True):
            if value.type.shape and value not in self.forms and len(value.users) == 1:
                old_values = [other for other, form in self.forms.items() if form == Array(name)]
                readers = {op for old in old_values for op in old.users if not op.name.startswith("scf.")}
                if readers <= {value.defining_op}:
                    self.targets[value] = name


def c_code(kernel: Block, most_wait: int) -> str:
    """Returns the C code of a kernel with this body.

    A program that waits for another for `most_wait` seconds of CPU time ends with an error.
    """
    writer = Writer()
    for i, value in enumerate(kernel.arguments):
        writer.define(value, f"a->x{i}")
    writer.block(kernel)
    body = "\n".join(writer.lines)
    members = "".join(f" {c_type(value.type.element)}x{i};" for i, value in enumerate(kernel.arguments))
    return f"""\
#define MOST_LANES {writer.most_lanes}
#define WAIT {most_wait}
{PRELUDE}
struct arguments {{{members} }};
static int run_program(const struct arguments *a, int32_t program, int32_t programs) {{
{body}
    return 0;
}}
struct launch {{ struct arguments arguments; int32_t programs, next, failed; }};
/* each thread runs programs until all have been taken */
static void take_programs(void *data) {{
    struct launch *launch = data;
    int32_t program;
    while ((program = __atomic_fetch_add(&launch->next, 1, __ATOMIC_RELAXED)) < launch->programs)
        if (run_program(&launch->arguments, program, launch->programs))
            __atomic_store_n(&launch->failed, 1, __ATOMIC_RELAXED);
}}
typedef void parallel(void (*)(void *), void *, unsigned, unsigned);
int run(const void *arguments, int32_t programs, int32_t threads, parallel *parallel) {{
    struct launch launch = {{ .programs = programs }};
    memcpy(&launch.arguments, arguments, sizeof launch.arguments);
    if (threads > 1 && programs > 1) parallel(take_programs, &launch, threads, 0);
    else take_programs(&launch);
    return launch.failed;
}}
"""
