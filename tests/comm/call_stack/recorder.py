"""Inside gdb: prints the classes whose objects an all_reduce has entered where it first comes to the function of POINT.

An object is counted each time that it is entered from another one. Functions without an object are left out.
"""

import os

import gdb

MOST_STOPS = 5000


def frames():
    """(function, class of the object or '', address of the object or None), outermost first."""
    found, frame = [], gdb.newest_frame()
    while frame is not None:
        of, address = "", None
        try:
            this = frame.read_var("this")
            of, address = str(this.dynamic_type.target().unqualified()), int(this)
        except (ValueError, gdb.error, RuntimeError):
            pass  # no member function, or one of code without debug information
        found.append((frame.name() or "", of, address))
        frame = frame.older()
    return found[::-1]


def entered(stack):
    """The classes on the way from Communicator::all_reduce; None: the stop is on another way."""
    begin = next((i for i, (name, _, _) in enumerate(stack) if name.endswith("Communicator::all_reduce")), None)
    if begin is None:
        return None
    classes = []
    for _, of, address in stack[begin:]:
        name = of.removeprefix("class ").removeprefix("struct ").rpartition("::")[2]
        if address is not None and "lambda" not in of and "{" not in of and (not classes or classes[-1] != name):
            classes.append(name)
    return classes


gdb.execute("set pagination off")
gdb.execute("set breakpoint pending on")
gdb.execute("set debuginfod enabled off")
gdb.Breakpoint(os.environ["POINT"])
gdb.execute("run", to_string=True)
for _ in range(MOST_STOPS):
    if gdb.selected_inferior().pid == 0:
        break
    classes = entered(frames())
    if classes is not None:
        print("entered:", " > ".join(classes))
        gdb.execute("kill")
        break
    gdb.execute("continue", to_string=True)
