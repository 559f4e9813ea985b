"""Data on the way between two hosts: a device in the path changes nothing unnoticed, and with TLS it reads nothing.

The hosts are network namespaces. The device is at the other end of each one's link, with the address of the other host:
it relays all connections, and does with them what it likes.
"""

import ctypes
import re
import socket
import struct
import threading

import jobs
import networks

PORT, FIRST, LAST = 29400, 40000, 40023  # of the rendezvous; of all others on the hosts
TIMEOUT = 4  # seconds
HEADER, MAGIC = 80, b"TSC3"  # of a frame (backends/tcp/frame.h)
LARGE = 4096
LIBC = ctypes.CDLL(None, use_errno=True)
XXHASH = ctypes.CDLL("libxxhash.so.0")
XXHASH.XXH3_64bits.restype = ctypes.c_uint64
XXHASH.XXH3_64bits.argtypes = (ctypes.c_char_p, ctypes.c_size_t)


def enter(namespace):
    """Moves this thread; sockets stay where they were made."""
    with open(f"/var/run/netns/{namespace}", encoding="ascii") as file:
        if LIBC.setns(file.fileno(), 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def code(data):
    return struct.pack("<QQ", XXHASH.XXH3_64bits(bytes(data), len(data)), 0)


def frames(data):
    """The complete frames, and the rest; after other bytes, which come first."""
    at = data.find(MAGIC)
    units = [data[:at]] if at > 0 else []
    while 0 <= at <= len(data) - HEADER:
        end = at + HEADER + struct.unpack_from("<I", data, at + 20)[0]
        if end > len(data):
            break
        units.append(data[at:end])
        at = end
    return (units, data[at:]) if at >= 0 else ([], data)


def records(data):
    """Of TLS."""
    units, at = [], 0
    while at <= len(data) - 5:
        end = at + 5 + struct.unpack_from(">H", data, at + 3)[0]
        if end > len(data):
            break
        units.append(data[at:end])
        at = end
    return units, data[at:]


class Cut(Exception):
    pass


class Device:
    """Relays; changes one large frame or record of a connection between the ranks once, in the direction to its listener."""

    def __init__(self, pair):
        self.sockets, self.open = [], True
        self.begin(None)
        sides = [(pair.devices[0].name, pair.devices[1].name, 1), (pair.devices[1].name, pair.devices[0].name, 0)]
        for near, far, target in sides:
            ready = threading.Event()
            threading.Thread(target=self.listen, args=(near, far, pair.ADDRESSES[target], [PORT] if target == 0 else range(FIRST, LAST + 1), ready),
                             daemon=True).start()
            if not ready.wait(20):
                raise AssertionError("the device does not start")

    def begin(self, change):
        self.change, self.held, self.changed, self.seen = change, None, False, bytearray()

    def listen(self, near, far, address, ports, ready):
        enter(near)
        listeners = [socket.create_server((address, port)) for port in ports]
        self.sockets += listeners
        enter(far)
        ready.set()
        for listener in listeners[1:]:
            threading.Thread(target=self.accept, args=(listener, far, address), daemon=True).start()
        self.accept(listeners[0], far, address)

    def accept(self, listener, far, address):
        enter(far)
        while self.open:
            try:
                near_end, _ = listener.accept()
            except OSError:
                return
            try:
                far_end = socket.create_connection((address, listener.getsockname()[1]), 5)
            except OSError:
                near_end.close()
                continue
            far_end.settimeout(None)
            self.sockets += [near_end, far_end]
            data = listener.getsockname()[1] != PORT
            for source, sink, to_listener in ((near_end, far_end, data), (far_end, near_end, False)):
                threading.Thread(target=self.relay, args=(source, sink, to_listener), daemon=True).start()

    def relay(self, source, sink, changes):
        rest = b""
        try:
            while received := source.recv(1 << 16):
                if not changes:
                    sink.sendall(received)
                    continue
                self.seen += received
                rest += received
                units, rest = records(rest) if rest[:2] == b"\x16\x03" or rest[:3] == b"\x17\x03\x03" else frames(rest)
                if not units and MAGIC not in rest and rest[:1] not in (b"\x16", b"\x17"):
                    units, rest = [rest], b""  # the handshake
                for unit in units:
                    for out in self.apply(unit):
                        sink.sendall(out)
            sink.shutdown(socket.SHUT_WR)
        except (OSError, Cut):
            self.shut((source, sink))

    def apply(self, unit):
        if self.held is not None:
            held, self.held = self.held, None
            return [unit, held]
        if self.changed or self.change is None or len(unit) < LARGE:
            return [unit]
        self.changed = True
        if self.change == "cut":
            raise Cut
        if self.change == "reorder":
            self.held = unit
        if self.change in ("drop", "reorder"):
            return []
        if self.change == "replay":
            return [unit, unit]
        unit = bytearray(unit)
        unit[HEADER + (len(unit) - HEADER) // 8 * 4 + 3] ^= 2  # the exponent of a float, if it is not encrypted
        if self.change == "recompute" and unit.startswith(MAGIC):
            unit[48:64] = code(unit[HEADER:])
            unit[64:80] = code(unit[:64])
        return [bytes(unit)]

    def close(self):
        self.open = False
        self.shut(self.sockets)

    @staticmethod
    def shut(ends):
        for end in ends:
            try:
                end.shutdown(socket.SHUT_RDWR)  # also ends a thread that waits for it
            except OSError:
                pass  # it has ended already


class Path:
    """Two hosts; on the way between them a device."""

    ADDRESSES = networks.Pair.ADDRESSES

    def __init__(self):
        self.hosts, self.devices = [], []
        try:
            for side in range(2):
                host, device = networks.Host(), networks.Host()
                self.hosts.append(host)
                self.devices.append(device)
                networks.ip("-n", host.name, "link", "add", "wire0", "type", "veth", "peer", "name", "wire0", "netns", device.name)
                for end, address in ((host, self.ADDRESSES[side]), (device, self.ADDRESSES[1 - side])):
                    end.ip("address", "add", address + "/24", "dev", "wire0")
                    end.ip("link", "set", "wire0", "up")
                jobs.run(host.command(["sh", "-c", f"echo {FIRST} {LAST} > /proc/sys/net/ipv4/ip_local_port_range"]))
        except BaseException:
            self.remove()
            raise

    def remove(self):
        for host in self.hosts + self.devices:
            host.remove()
        self.hosts, self.devices = [], []


class WireTest(jobs.Case):
    @classmethod
    def setUpClass(cls):
        cls.way = Path()
        cls.addClassCleanup(cls.way.remove)
        cls.device = Device(cls.way)
        cls.addClassCleanup(cls.device.close)

    def train(self, change=None, **variables):
        """One rank on each host: how both ended, the hashes of their parameters, and the bytes that the device has seen."""
        self.device.begin(change)
        common = dict(TESSERA_WORLD_SIZE=2, TESSERA_MASTER=f"{Path.ADDRESSES[0]}:{PORT}", TESSERA_TOKEN="swordfish", TESSERA_RUN_ID=self.mark(),
                      TESSERA_TIMEOUT=f"{TIMEOUT}s", TESSERA_TCP_STREAMS=1, **variables)
        command = self.training("train", "--strategy", "ddp", "--backend", "tcp", "--global-batch", 2, "--seq-len", 32, steps=2)
        ranks = [jobs.start(host.command([*command, "--json", self.path(f"{r}.json")]), jobs.environment(**common, TESSERA_RANK=r))
                 for r, host in enumerate(self.way.hosts)]
        with jobs.Job(ranks):
            ended = [jobs.finish(rank, 30) for rank in ranks]
        self.assertEqual(self.device.changed, change is not None, ended)
        return ended, bytes(self.device.seen)

    def final_hash(self):
        with open(self.path("0.json"), encoding="utf-8") as file:
            return re.search(r'"final_parameters_hash": ?"?([0-9a-fx]+)', file.read()).group(1)

    def assert_errors(self, ended, pattern):
        """On each rank one line, which says what happened on the way."""
        for one in ended:
            self.assertNotEqual(one.code, 0, ended)
            self.assertEqual(len(jobs.last_words(one.err)), 1, ended)
            self.assertRegex(one.err, pattern)

    CHANGED = r"from rank 0 .*was changed on the way: its authentication code is wrong|from rank 0 was changed on the way"

    def test_a_change_is_an_error_on_both_ranks(self):
        for change in ("flip", "recompute", "replay", "reorder", "drop"):
            with self.subTest(change=change):
                self.assert_errors(self.train(change)[0], self.CHANGED)

    def test_a_change_of_encrypted_data_is_an_error_on_both_ranks(self):
        for change in ("flip", "replay", "reorder", "drop"):
            with self.subTest(change=change):
                self.assert_errors(self.train(change, TESSERA_TLS=1)[0], self.CHANGED)

    def test_a_cut_is_an_error_on_both_ranks(self):
        for tls in (0, 1):
            with self.subTest(tls=tls):
                self.assert_errors(self.train("cut", TESSERA_TLS=tls)[0], r"rank [01]")

    def test_without_a_code_recomputed_checksums_hide_a_change(self):  # negative control
        for one in self.train(TESSERA_TCP_MAC="off")[0]:
            self.assert_good(one)
        right = self.final_hash()
        for one in self.train("recompute", TESSERA_TCP_MAC="off")[0]:
            self.assert_good(one)
        self.assertNotEqual(self.final_hash(), right)
        self.assert_errors(self.train("flip", TESSERA_TCP_MAC="off")[0], "is damaged: its checksum is wrong")

    def test_tensors_are_not_readable_with_tls(self):
        ended, plain = self.train()
        for one in ended:
            self.assert_good(one)
        hash_of_plain = self.final_hash()
        tensor = max(frames(plain)[0], key=len)[HEADER:]  # gradients, the same in each run
        pieces = [tensor[at:at + 64] for at in range(0, len(tensor) - 64, 64)]
        pieces = [piece for piece in pieces if len(set(piece)) > 16]
        self.assertGreater(len(pieces), 50)
        for one in (runs := self.train(TESSERA_TLS=1))[0]:
            self.assert_good(one)
        self.assertEqual(self.final_hash(), hash_of_plain)
        self.assertFalse(any(piece in runs[1] for piece in pieces))
        self.assertGreater(len(runs[1]), len(plain))
        again = self.train()[1]  # control
        self.assertTrue(all(piece in again for piece in pieces))


if __name__ == "__main__":
    jobs.main()
