"""The end of clients: close, being forgotten, the interpreter's exit, fork."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref

import pytest

import tszmq
from tests.client_fixtures import answer_one, inflight, partial_of
from tests.mock_engine import PATIENCE, UNIT, eventually, in_thread, stays_true
from tszmq import SamplingParams
from tszmq.core.policy import RoundRobin

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # clients are forgotten on purpose
]

WAITS = {
    "generate": lambda client: client.generate([1]),
    "next": lambda client: next(client.stream([1])),
    "result": lambda client: client.stream([1]).result(),
    "result with timeout": lambda client: client.stream([1]).result(30),
    "generate with timeout": lambda client: client.generate([1], timeout=30),
    "generate_many": lambda client: client.generate_many([[1], [2]]),
    "as_completed": lambda client: next(client.as_completed([[1], [2]])),
}


# --- close ---------------------------------------------------------------------------------


@pytest.mark.parametrize("call", WAITS)
def test_close_wakes_waiters(client_and_engines, call):
    """ClientClosed, soon, whatever the thread waits in."""
    client, [engine] = client_and_engines()
    waiting = in_thread(WAITS[call], client)
    engine.recv_add()
    stays_true(lambda: not waiting.done(), 0.05)
    started = time.monotonic()
    client.close()
    with pytest.raises(tszmq.ClientClosed):
        waiting.result(PATIENCE)
    assert time.monotonic() - started < PATIENCE


@pytest.mark.parametrize("timeout", [None, 30])
def test_close_wakes_those_who_wait_for_a_place(client_and_engines, timeout):
    """At max_inflight."""
    client, [engine] = client_and_engines(max_inflight=1)
    with client.stream([1]):
        engine.recv_add()
        waiting = in_thread(client.generate, [2], timeout=timeout)
        stays_true(lambda: not waiting.done(), 0.1)
        client.close()
        with pytest.raises(tszmq.ClientClosed):
            waiting.result(PATIENCE)


def test_close_many_times_and_from_many_threads(client_and_engines):
    """All return when it is closed; none fails."""
    client, [engine] = client_and_engines()
    address = client.endpoints.handshake
    waiting = in_thread(client.generate, [1])
    engine.recv_add()
    with client.stream([2]) as stream:
        engine.tokens(engine.recv_add().rid, [5, 6])
        assert next(stream).token_ids == [5, 6]
        closing = [in_thread(client.close) for _ in range(4)]
        for call in closing:
            assert call.result(PATIENCE) is None
        client.close()
        client.close(timeout=1)
        with pytest.raises(tszmq.ClientClosed) as caught:
            next(stream)
        assert partial_of(caught.value).token_ids == [5, 6]
    with pytest.raises(tszmq.ClientClosed) as caught:
        waiting.result(PATIENCE)
    assert partial_of(caught.value).token_ids == []
    with pytest.raises(tszmq.ClientClosed) as caught:
        client.generate([1])
    assert caught.value.partial is None
    tszmq.Client.bind(address).close()


def test_close_from_another_thread_in_a_block(client_and_engines):
    """Leaving the block afterwards is fine."""
    client, _ = client_and_engines()
    with client:
        in_thread(client.close).result(PATIENCE)
        assert not client.is_alive


def test_leaving_the_block_closes(client_and_engines):
    """With an exception too, which goes on."""
    client, _ = client_and_engines()

    def body():
        with client as entered:
            assert entered is client
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    with pytest.raises(tszmq.ClientClosed):
        client.generate([1])


def test_every_call_after_close(client_and_engines):
    """ClientClosed at once; being dead is no error to ask about."""
    client, [engine] = client_and_engines()
    stream = client.stream([1], request_id="label")
    engine.tokens(engine.recv_add().rid, [5])
    assert next(stream).token_ids == [5]
    client.close()
    assert client.is_alive is False
    for call in WAITS.values():
        with pytest.raises(tszmq.ClientClosed):
            call(client)
    with pytest.raises(tszmq.ClientClosed):
        next(stream)
    with pytest.raises(tszmq.ClientClosed):
        stream.result()
    stream.close()
    del stream
    gc.collect()


def test_finished_results_survive_close(client_and_engines):
    """What had come whole can still be read."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    engine.tokens(engine.recv_add().rid, [5, 6], "stop")
    answer_one(client, engine)
    client.close()
    assert stream.result(0).token_ids == [5, 6]
    assert [chunk.token_ids for chunk in stream] in ([[5, 6]], [])


def test_close_with_a_dead_engine_and_unsent_data(client_and_engines):
    """Nothing waits for a peer that will never read."""
    client, [engine] = client_and_engines(process=True)
    engine.stop()
    streams = [client.stream([1] * 8000) for _ in range(200)]
    engine.kill()
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < PATIENCE
    assert len(streams) == 200


def test_close_with_a_stopped_engine_and_unsent_data(client_and_engines):
    """The same with one that is still connected."""
    client, [engine] = client_and_engines(process=True)
    engine.stop()
    streams = [client.stream([1] * 8000) for _ in range(200)]
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < PATIENCE
    assert len(streams) == 200


def test_close_under_load(client_and_engines):
    """64 threads in all kinds of calls: each ends with a result or ClientClosed."""
    client, _ = client_and_engines(2, auto=True)
    stop = threading.Event()
    calls = list(WAITS.values())

    def work(number):
        while not stop.is_set():
            try:
                calls[number % len(calls)](client)
            except tszmq.ClientClosed:
                return True
        return False

    working = [in_thread(work, number) for number in range(64)]
    stays_true(lambda: not any(call.done() for call in working), 0.3)
    started = time.monotonic()
    client.close()
    took = time.monotonic() - started
    results = [call.result(PATIENCE) for call in working]
    stop.set()
    assert all(results)
    assert took < PATIENCE


# --- being forgotten -----------------------------------------------------------------------


def test_forgotten_client_is_collected_and_its_threads_end(client_and_engines):
    """Nothing of ours keeps it alive; its addresses are free again."""
    before = set(threading.enumerate())
    client, engines = client_and_engines()
    client.generate  # noqa: B018  a bound method must not do it either
    address = client.endpoints.handshake
    directory = os.path.dirname(client.endpoints.input.removeprefix("ipc://"))
    threads = [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name != "test-call"
    ]
    assert threads, "this test looks for the client's threads in vain"
    answer_one(client, engines[0])
    watch = weakref.ref(client)
    client_and_engines.forget(client)
    del client
    gc.collect()
    eventually(lambda: watch() is None)  # the thread of the call above may not have ended yet
    eventually(lambda: not any(thread.is_alive() for thread in threads))
    eventually(lambda: not os.path.exists(directory))
    tszmq.Client.bind(address).close()


def test_client_forgotten_with_requests_in_flight(client_and_engines):
    """Streams that are dropped with it do not hold it up."""
    before = set(threading.enumerate())
    client, engines = client_and_engines(2)
    streams = [client.stream([n + 1]) for n in range(6)]
    threads = [t for t in threading.enumerate() if t not in before and t.name != "test-call"]
    for engine in engines:
        engine.recv_adds(3)
    watch = weakref.ref(client)
    client_and_engines.forget(client)
    del client, streams
    gc.collect()
    eventually(lambda: watch() is None)
    eventually(lambda: not any(thread.is_alive() for thread in threads))


def test_stream_outlives_the_reference_to_its_client(client_and_engines):
    """A stream in use is not cut off because nobody named the client."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    client_and_engines.forget(client)
    del client
    gc.collect()
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    assert next(stream).token_ids == [5]
    engine.tokens(rid, [6], "stop")
    assert stream.result(PATIENCE).token_ids == [5, 6]


def test_forgotten_bound_client(client_and_engines):
    """One that never connected frees its address too."""
    bound = tszmq.Client.bind("tcp://127.0.0.1:*")
    address = bound.endpoints.handshake
    del bound
    gc.collect()

    def free():
        try:
            tszmq.Client.bind(address).close()
        except tszmq.ConnectError:
            return False
        return True

    eventually(free)


@pytest.mark.slow
def test_descriptors_return(client_and_engines):
    """200 clients opened, used and closed leave the process as it was."""

    def one():
        client, [engine] = client_and_engines()
        answer_one(client, engine)
        client.close()
        client_and_engines.forget(client)
        engine.close()

    for _ in range(3):
        one()
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    longest = 0.0
    for _ in range(200):
        started = time.monotonic()
        one()
        longest = max(longest, time.monotonic() - started)
    gc.collect()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    eventually(lambda: threading.active_count() <= threads)
    assert longest < PATIENCE


# --- what a client is not ------------------------------------------------------------------


def test_clients_and_streams_are_not_copied(client_and_engines):
    """A TypeError that says so, not a second owner of the same sockets."""
    client, [engine] = client_and_engines()
    with client.stream([1]) as stream:
        engine.recv_add()
        for thing in (client, stream):
            with pytest.raises(TypeError):
                pickle.dumps(thing)
            with pytest.raises(TypeError):
                copy.copy(thing)
            with pytest.raises(TypeError):
                copy.deepcopy(thing)
        stream.close()
        engine.recv_abort()
    answer_one(client, engine)


def test_process_is_left_as_it_was(client_and_engines):
    """No signal handlers, collector settings, switch interval or warnings filters of ours."""

    def state():
        handlers = {}
        for number in signal.valid_signals():
            handlers[number] = signal.getsignal(number)
        return (
            handlers,
            gc.get_threshold(),
            gc.isenabled(),
            gc.get_freeze_count(),
            sys.getswitchinterval(),
            sys.excepthook,
            threading.excepthook,
            sys.unraisablehook,
        )

    before = state()
    client, [engine] = client_and_engines()
    answer_one(client, engine)
    assert state() == before
    client.close()
    assert state() == before


@pytest.mark.slow
def test_idle_client_uses_no_processor(client_and_engines):
    """It waits for messages, not for time to pass."""
    client, engines = client_and_engines(2)
    with client.stream([1]):
        for engine in engines:
            engine.drain()
        started = time.process_time()
        threading.Event().wait(3)
        assert time.process_time() - started < 0.15
    for engine in engines:
        engine.drain()


def test_first_token_after_idling_is_not_late(client_and_engines):
    """No timer has to come round first."""
    client, [engine] = client_and_engines()
    with client.stream([1]) as stream:
        rid = engine.recv_add().rid
        delays = []
        for token in range(20):
            threading.Event().wait(0.02)
            started = time.monotonic()
            engine.tokens(rid, [token])
            assert next(stream).token_ids == [token]
            delays.append(time.monotonic() - started)
        # Less than any period one would poll with: all but the first would wait for most of one.
        assert sorted(delays)[1] < 0.05


# --- the interpreter's exit ----------------------------------------------------------------

SCRIPT = """
import atexit, gc, sys, threading
import tszmq
from tszmq import Client, SamplingParams

LONG = SamplingParams(max_tokens=100_000)
client = Client(sys.argv[1], connect_timeout=20)
def leaving():
    print("leaving", flush=True)
"""

EXITS = {
    "nothing open": "client.generate([1]); leaving()",
    "closed": "client.generate([1]); client.close(); leaving()",
    "streams open": """
streams = [client.stream([n + 1], LONG) for n in range(20)]
next(streams[0])
leaving()
""",
    "streams open in a cycle": """
class Holder: pass
holder = Holder()
holder.stream = client.stream([1], LONG)
holder.itself = holder
next(holder.stream)
del holder
leaving()
""",
    "generator in a block open": """
def tokens():
    with client.stream([1], LONG) as stream:
        yield from stream
generator = tokens()
next(generator)
leaving()
""",
    "threads in calls": """
def call(work):
    try:
        work()
    except tszmq.TszmqError:
        pass
works = [
    lambda: client.generate([1], LONG),
    lambda: client.generate([1], LONG, timeout=60),
    lambda: client.stream([1], LONG).result(),
    lambda: client.generate_many([[1], [2]], LONG),
    lambda: list(client.stream([1], LONG)),
]
for work in works * 4:
    threading.Thread(target=call, args=(work,), daemon=True).start()
next(client.stream([7], LONG))
leaving()
""",
    "sys.exit in a block": """
with client.stream([1], LONG) as stream:
    next(stream)
    leaving()
    sys.exit(0)
""",
    "close registered at exit": """
atexit.register(client.close)
stream = client.stream([1], LONG)
next(stream)
leaving()
""",
    "generate at exit": """
def last():
    try:
        print(client.generate([1], SamplingParams(max_tokens=2), timeout=1).finish_reason)
    except tszmq.TszmqError as error:
        print(type(error).__name__)
atexit.register(last)
leaving()
""",
    "stream and close at exit": """
def last():
    try:
        with client.stream([1], LONG, timeout=1) as stream:
            next(stream)
    except tszmq.TszmqError as error:
        print(type(error).__name__)
    client.close()
    client.close()
atexit.register(last)
leaving()
""",
    "closing thread at exit": """
threading.Thread(target=client.close).start()
leaving()
""",
    "client in a cycle": """
class Holder: pass
holder = Holder()
holder.client, holder.itself = client, holder
del holder, client
leaving()
""",
    "bound and never connected": """
bound = Client.bind("tcp://127.0.0.1:*")
leaving()
""",
    "thread in connect": """
bound = Client.bind("tcp://127.0.0.1:*")
def wait():
    try:
        bound.connect()
    except tszmq.ClientClosed:
        pass
threading.Thread(target=wait, daemon=True).start()
leaving()
""",
}


def exits_cleanly(result):
    assert result.exit_code == 0, result
    assert result.errors == ""
    assert result.leaving is not None
    assert result.leaving < 4 * UNIT


@pytest.mark.parametrize("name", EXITS)
def test_interpreter_exits(client_and_engines, run_script, short_dir, name):
    """Exit code 0 within a few seconds and nothing on standard error, whatever is still open."""
    address = f"ipc://{short_dir}/handshake.sock"
    client_and_engines.engine(address, auto=True, step_delay=0.005)
    exits_cleanly(run_script(SCRIPT + EXITS[name], address))


FORGOTTEN = {
    "returned from a function": """
def main(client):
    stream = client.stream([1], LONG)
    next(stream)
borrowed, client = [client], None
main(borrowed.pop())
leaving()
""",
    "deleted": """
stream = client.stream([1], LONG)
next(stream)
del stream, client
leaving()
""",
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_client_forgotten_just_before_the_exit_tells_its_engine(
    client_and_engines, run_script, short_dir, name
):
    """Its threads have not heard of it by then; it leaves no files, either."""
    address = f"ipc://{short_dir}/h/handshake.sock"
    engine = client_and_engines.engine(address)
    private = short_dir / "private"
    private.mkdir()
    script = f"import tempfile\ntempfile.tempdir = {str(private)!r}\n" + SCRIPT + FORGOTTEN[name]
    running = in_thread(run_script, script, address)
    engine.connect()
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    exits_cleanly(running.result(2 * PATIENCE))
    assert engine.recv_abort() == [rid]
    assert list(private.iterdir()) == []
    assert list((short_dir / "h").iterdir()) == []


@pytest.mark.parametrize("fate", ["kill", "stop"])
def test_interpreter_exits_with_unsent_data(client_and_engines, run_script, short_dir, fate):
    """An engine that is dead, or does not read, does not hold it up."""
    address = f"ipc://{short_dir}/handshake.sock"
    engine = client_and_engines.engine(address, process=True)
    connected = short_dir / "connected"  # before that, the engine has to answer this test
    body = """
import os, signal, time
pid = int(sys.argv[2])
while not os.path.exists(sys.argv[4]):
    time.sleep(0.01)
os.kill(pid, signal.SIGSTOP)
streams = [client.stream([1] * 8000, LONG) for _ in range(200)]
if sys.argv[3] == "kill":
    os.kill(pid, signal.SIGKILL)
leaving()
"""
    arguments = (address, str(engine.pid), fate, str(connected))
    running = in_thread(run_script, SCRIPT + body, *arguments)
    engine.connect()
    connected.touch()
    exits_cleanly(running.result(4 * PATIENCE))


def test_engine_hears_nothing_of_a_client_that_crashed(client_and_engines, run_script, short_dir):
    """os._exit: the socket files stay behind, and the next client takes them over."""
    address = f"ipc://{short_dir}/handshake.sock"
    client_and_engines.engine(address, auto=True)
    body = "import os\nclient.generate([1])\nleaving()\nos._exit(0)"
    exits_cleanly(run_script(SCRIPT + body, address))
    assert (short_dir / "handshake.sock").exists()
    client, [engine] = client_and_engines(endpoints=address)
    answer_one(client, engine)


# --- fork ----------------------------------------------------------------------------------

FORK = """
import os, pickle, signal, sys, time, warnings
warnings.simplefilter("ignore")
import tszmq
from tszmq import Client, SamplingParams

LONG = SamplingParams(max_tokens=200)
address = sys.argv[1]
client = Client(address, connect_timeout=20)
stream = client.stream([1, 2], LONG)
first = next(stream)
bound = Client.bind("tcp://127.0.0.1:*")
results = client.as_completed([[3], [4]], LONG)
next(results)
chunks = client.stream_many([[6], [7]], LONG)
next(chunks)
child = os.fork()
if child == 0:
    signal.alarm(20)
    calls = {
        "generate": lambda: client.generate([1]),
        "stream": lambda: client.stream([1]),
        "generate_many": lambda: client.generate_many([[1]]),
        "as_completed": lambda: list(client.as_completed([[1]])),
        "abort": lambda: client.abort("x"),
        "abort_all": lambda: client.abort_all(),
        "next": lambda: next(stream),
        "result": lambda: stream.result(),
        "connect": lambda: bound.connect(1),
        "results": lambda: next(results),
        "chunks": lambda: next(chunks),
    }
    for name, call in calls.items():
        try:
            call()
        except tszmq.ForkedClient:
            continue
        except BaseException as error:
            print("child:", name, "raised", repr(error), flush=True)
        else:
            print("child:", name, "did not raise", flush=True)
    with stream:
        pass
    stream.close()
    client.close()
    bound.close()
    with client:
        pass
    del stream, results, chunks, client, bound
    import gc
    gc.collect()
    print("child done", flush=True)
    sys.exit(7)
_, status = os.waitpid(child, 0)
print("child ended", os.waitstatus_to_exitcode(status))
print("socket", os.path.exists(address.removeprefix("ipc://")))
print("directory", os.path.exists(client.endpoints.input.removeprefix("ipc://")))
done = stream.result(20)
print("stream", done.finish_reason, len(done.token_ids))
print("again", client.generate([5], SamplingParams(max_tokens=3)).finish_reason)
print("rest", len(list(results)))
print("chunks", len(list(chunks)) > 0)
client.close()
bound.close()
print("leaving", flush=True)
"""


def test_fork(client_and_engines, run_script, short_dir):
    """The child may only let go; the parent's requests go on and nothing is aborted."""
    address = f"ipc://{short_dir}/handshake.sock"
    engine = client_and_engines.engine(address, auto=True, step_delay=0.005)
    result = run_script(FORK, address)
    assert result.output.splitlines() == [
        "child done",
        "child ended 7",
        "socket True",
        "directory True",
        "stream length 200",
        "again length",
        "rest 1",
        "chunks True",
        "leaving",
    ]
    exits_cleanly(result)
    assert engine.aborts == []


@pytest.mark.parametrize("where", ["prompts", "prompts end", "params", "progress"])
def test_fork_in_what_a_bulk_call_calls(client_and_engines, run_script, short_dir, where):
    """The child, which returns from it into the call, hears of it at once."""
    address = f"ipc://{short_dir}/handshake.sock"
    client_and_engines.engine(address, auto=True)
    result = run_script(
        """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import tszmq
from tszmq import Client, SamplingParams
client, child = Client(sys.argv[1], connect_timeout=20), None

def fork(here):
    global child
    if child is None and here == sys.argv[2]:
        child = os.fork()
        if child == 0:
            signal.alarm(20)

def each(values, here):
    for number, value in enumerate(values):
        if number == 5:
            fork(here)
        yield value
    fork(here + " end")

prompts, params = ([n + 1] for n in range(20)), (SamplingParams(max_tokens=3) for _ in range(20))
try:
    results = client.generate_many(
        each(prompts, "prompts"), each(params, "params"), max_inflight=4,
        progress=(lambda *_: fork("progress")) if sys.argv[2] == "progress" else False,
    )
except tszmq.ForkedClient:
    os._exit(7 if child == 0 else 1)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status), "parent", len(results))
client.close()
print("leaving", flush=True)
""",
        address,
        where,
    )
    assert result.output.splitlines() == ["child 7 parent 20", "leaving"]
    exits_cleanly(result)


LIVING_CHILD = """
import os, signal, socket, sys, warnings
warnings.simplefilter("ignore")
from tszmq import Client
from tszmq.sim import Fleet

def inodes():
    found = set()
    for entry in os.listdir("/dev/fd"):
        try:
            found.add(os.stat(f"/dev/fd/{entry}").st_ino)
        except OSError:
            pass
    return found

def named(names):
    # How many sockets of this process have one of these local addresses.
    found = 0
    for entry in os.listdir("/dev/fd"):
        try:
            borrowed = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue
        with borrowed:
            name = borrowed.getsockname()
            is_stream = borrowed.type == socket.SOCK_STREAM
        port = name[1] if isinstance(name, tuple) and len(name) > 1 else None
        found += is_stream and (name in names or port in names)
    return found

others = [socket.create_server(("127.0.0.1", 0)), *socket.socketpair()]
others.append(socket.create_connection(others[0].getsockname()))
closed = Client.bind("tcp://127.0.0.1:*")
port = int(closed.endpoints.handshake.rpartition(":")[2])
closed.close()
others.append(socket.create_server(("127.0.0.1", port)))  # in the place of a closed client
mine = {os.fstat(each.fileno()).st_ino for each in others}

bound = Client.bind(sys.argv[1], allow_remote=True)
print(bound.endpoints.handshake, flush=True)
engines = Fleet(1)
engines.start(sys.argv[2])
client = bound.connect(20)
client.generate([1])
addresses = client.endpoints
texts = [addresses.handshake, addresses.input, addresses.output]
names = [
    text.removeprefix("ipc://") if text.startswith("ipc") else int(text.rpartition(":")[2])
    for text in texts
]
# On the same port, and none of ours: datagrams, and an address of the other family.
if isinstance(names[0], int):
    others.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    others[-1].bind(("127.0.0.1", names[0]))
    if "[" not in texts[0]:
        others.append(socket.socket(socket.AF_INET6))
        others[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        others[-1].bind(("::1", names[0]))
        others[-1].listen()
        names = [name for name in names if name != names[0]]  # it is counted elsewhere
mine |= {os.fstat(each.fileno()).st_ino for each in others}
before = named(names)
socket.setdefaulttimeout(5)
(go, told), (ready, say) = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(20)
    os.close(told)
    socket.setdefaulttimeout(None)
    print("others", mine <= inodes(), flush=True)
    print("copies", before > 0, named(names), flush=True)
    os.write(say, b"x")
    os.read(go, 1)
    os._exit(0)
os.read(ready, 1)
print("blocking", others[0].getblocking(), os.get_blocking(others[0].fileno()))
client.close()
again = Client.bind(addresses, allow_remote=True)
print("bound again", again.endpoints == addresses)
again.close()
engines.terminate()
for each in others:
    each.close()
os.write(told, b"x")
_, status = os.waitpid(child, 0)
print("status", status)
print("leaving", flush=True)
"""


@pytest.mark.embedded
@pytest.mark.parametrize("where", ["tcp://127.0.0.1", "tcp://0.0.0.0", "tcp://[::]", "ipc"])
def test_a_child_that_lives_on_keeps_no_address(run_script, short_dir, where):
    """Workers of a pool, say: the parent can close its client, and make another one there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"ipc://{short_dir}/h" if where == "ipc" else f"{where}:{port}"
    reached = address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "127.0.0.1")
    result = run_script(LIVING_CHILD, address, reached)
    assert result.output.splitlines() == [
        address,
        "others True",
        "copies True 0",
        "blocking True True",
        "bound again True",
        "status 0",
        "leaving",
    ]
    exits_cleanly(result)


def test_client_of_a_child(client_and_engines, run_script, short_dir):
    """A forked child may make a client of its own."""
    address = f"ipc://{short_dir}/handshake.sock"
    second = f"ipc://{short_dir}/second.sock"
    client_and_engines.engine(address, auto=True)
    client_and_engines.engine(second, auto=True)
    result = run_script(
        """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from tszmq import Client
client = Client(sys.argv[1], connect_timeout=20)
child = os.fork()
if child == 0:
    signal.alarm(20)
    with Client(sys.argv[2], connect_timeout=20) as own:
        print("child", own.generate([1]).finish_reason, flush=True)
    sys.exit(0)
_, status = os.waitpid(child, 0)
print("status", status)
print("parent", client.generate([1]).finish_reason)
client.close()
print("leaving", flush=True)
""",
        address,
        second,
    )
    assert result.output.splitlines() == ["child length", "status 0", "parent length", "leaving"]
    exits_cleanly(result)


def test_inflight_is_zero_after_all_this(client_and_engines):
    """A client next to the others is not disturbed by what they go through."""
    client, [engine] = client_and_engines()
    other, _ = client_and_engines()
    with client.stream([1]) as stream:
        rid = engine.recv_add().rid
        other.close()
        client_and_engines.forget(other)
        del other
        gc.collect()
        engine.tokens(rid, [5], "stop")
        assert stream.result(PATIENCE).token_ids == [5]
    assert inflight(client) == [0]


def test_close_timeout_is_checked(client_and_engines):
    """A number of seconds, or None."""
    client, _ = client_and_engines()
    with pytest.raises((tszmq.InvalidRequest, TypeError)):
        client.close(timeout="soon")
    client.close(timeout=5)


def test_max_tokens_stays_the_callers(client_and_engines):
    """Params are frozen and shared without harm."""
    client, _ = client_and_engines(auto=True)
    params = SamplingParams(max_tokens=2)
    client.generate([1], params)
    client.generate_many([[1], [2]], params)
    assert params == SamplingParams(max_tokens=2)


def test_a_bound_client_is_connected_once(client_and_engines):
    client, _ = client_and_engines()
    with tszmq.Client.bind("tcp://127.0.0.1:*", connect_timeout=0) as bound:
        assert repr(bound) == f"<tszmq.BoundClient at {bound.endpoints.handshake}>"
        with pytest.raises(tszmq.HandshakeTimeout):
            bound.connect()
        assert repr(bound) == f"<tszmq.BoundClient at {bound.endpoints.handshake}, closed>"
    bound = tszmq.BoundClient(client._session, 1.0, tszmq.Client)
    with pytest.raises(tszmq.ConnectError, match="was connected before"):
        bound.connect()
    assert client.is_alive


def test_a_bound_client_is_connected_by_one_thread(client_and_engines):
    """The other is told so at once: closing its client would close the first one's."""
    bound = client_and_engines.bind("tcp://127.0.0.1:*")
    calls = [in_thread(bound.connect) for _ in range(4)]
    eventually(lambda: sum(call.done() for call in calls) == 3)
    for call in calls:
        if call.done():
            with pytest.raises(tszmq.ConnectError, match="or is being"):
                call.result()
    [waiting] = [call for call in calls if not call.done()]
    engine = client_and_engines.engine(bound.endpoints.handshake, 0).connect()
    with waiting.result(PATIENCE) as client:
        answer_one(client, engine)
        with pytest.raises(tszmq.ConnectError, match="was connected before"):
            bound.connect()
        answer_one(client, engine)


def test_a_subclass_makes_its_own_kind():
    class Own(tszmq.Client):
        pass

    with Own.embedded(1) as client:
        assert type(client) is Own


def test_what_a_closed_client_says_of_itself(client_and_engines):
    client, [engine] = client_and_engines()
    assert "engines: 1>" in repr(client)
    client.close()
    assert "closed" in repr(client)
    assert not client.health()[0].connected
    assert not client.engines[0].alive
    with pytest.raises(tszmq.ClientClosed), client:
        pass
    engine.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": RoundRobin}, r"RoundRobin\(\)"),
        ({"policy": object()}, "score"),
        ({"connect_timeout": None}, "connect_timeout must be a number of seconds, got None"),
    ],
)
def test_options_that_cannot_be_used(options, text):
    with pytest.raises(TypeError, match=text):
        tszmq.Client.bind("tcp://127.0.0.1:*", **options)


def test_a_bound_below_what_engines_register(client_and_engines):
    """TokenSpeed's own limit may be lower than anything that it registers."""
    client, [engine] = client_and_engines(max_request_tokens=100)
    assert client.engines[0].max_model_len == 100
    with pytest.raises(tszmq.InvalidRequest, match="takes at most 98"):
        client.generate([1] * 99)
    answer_one(client, engine)
    wide, [narrow] = client_and_engines(max_request_tokens=1000, engine={"max_model_len": 50})
    assert wide.engines[0].max_model_len == 50  # theirs stands where it is the lower one
    answer_one(wide, narrow)
    for wrong, kind in ((0, tszmq.InvalidRequest), (1.5, TypeError), ("9", TypeError)):
        with pytest.raises(kind, match="max_request_tokens"):
            tszmq.Client.bind("tcp://127.0.0.1:*", max_request_tokens=wrong)
