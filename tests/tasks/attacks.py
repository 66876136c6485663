"""Programs that attack the machine that runs them, for the tests of sandboxes."""

TOOLS = """
import ctypes, fcntl, mmap, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), "refused")

def reap(pid):
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def daemon():
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.fork()
    reap(pid)

def connect(family, kind, address):
    with socket.socket(family, kind) as client:
        client.connect(address)
        client.send(b"stolen")

def pair(kind):
    return socket.socketpair(socket.AF_UNIX, kind)[0]

def datagram(kind, address):
    pair(kind).sendto(b"stolen", address)

def raw_datagram(address):
    # sendto(2) itself, with bits above those that the kernel reads in the numbers of family and type
    ends = (ctypes.c_int * 2)()
    high = 1 << 32
    call(53, ctypes.c_long(socket.AF_UNIX + high), ctypes.c_long(socket.SOCK_DGRAM + high), 0, ends)
    packed = b"\\1\\0" + os.fsencode(address)
    call(44, ends[0], b"stolen", 6, 0, packed, len(packed))

def queue_in_the_kernel():
    end = pair(socket.SOCK_STREAM)
    end.setsockopt(socket.SOL_SOCKET, 32, 1 << 30)  # SO_SNDBUFFORCE, for root alone
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)

def own():
    signals, writes = os.pipe()
    fcntl.fcntl(signals, fcntl.F_SETOWN, PARENT)

def descriptors():
    for descriptor in range(3, 64):
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)
            if os.read(descriptor, 1):
                return
        except OSError:
            pass
    raise OSError("nothing to read")

def machine_code(code):
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()

def expect(found):
    if not found:
        raise OSError("nothing found")

def attempt(body):
    try:
        exec(body, globals())
    except (OSError, RuntimeError, ValueError):
        return "refused"
    return "done"
"""

# Those that harm no one are also run without a sandbox, where they succeed: they are real attacks.
HARMLESS = {
    "read a file": "open(SECRET).read()",
    "read by a path with dots": "open('/etc/../' + SECRET).read()",
    "read the list of users": "open('/etc/passwd').read()",
    "list a folder": "os.listdir(FOLDER)",
    "write a file": "open(FOLDER + '/new', 'w')",
    "make a folder": "os.mkdir(FOLDER + '/folder')",
    "make a symbolic link": "os.symlink(SECRET, FOLDER + '/link')",
    "read through a symbolic link": "open(FOLDER + '/there').read()",
    "make a hard link": "os.link(SECRET, FOLDER + '/hard')",
    "change permissions": "os.chmod(SECRET, 0o600)",
    "write to the temporary folder": "open(TEMPORARY + '/' + MARK, 'w')",
    "list processes": "os.listdir('/proc')",
    "read a process's environment": "open(f'/proc/{PARENT}/environ').read()",
    "read the environment": "expect('KEDGE_SECRET' in os.environ or 'sesame' in open('/proc/self/environ').read())",
    "signal the parent": "os.kill(PARENT, 0)",
    "have the kernel signal the parent": "own()",
    "read the parent's limits": "resource.prlimit(PARENT, resource.RLIMIT_NOFILE)",
    "lower the parent's priority": "os.setpriority(os.PRIO_PROCESS, PARENT, os.getpriority(os.PRIO_PROCESS, PARENT))",
    "move the parent to another processor": "os.sched_setaffinity(PARENT, os.sched_getaffinity(PARENT))",
    "fork": "reap(os.fork())",
    "fork by ctypes": "reap(libc.fork())",
    "start a daemon": "daemon()",
    "start a thread": "threading.Thread(target=print).start()",
    "start a shell": "subprocess.run(['/bin/sh', '-c', ':'], check=True)",
    "spawn a program": "os.waitpid(os.posix_spawn(sys.executable, ['python', '-V'], {}), 0)",
    "connect to a server": "connect(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', PORT))",
    "send a datagram": "connect(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', PORT))",
    "connect to a socket's file": "connect(socket.AF_UNIX, socket.SOCK_STREAM, FOLDER + '/socket')",
    "send a datagram to a socket's file": "datagram(socket.SOCK_DGRAM, FOLDER + '/datagrams')",
    "send a datagram to an abstract socket": "datagram(socket.SOCK_DGRAM, ABSTRACT)",
    "send a datagram from a raw socket": "datagram(socket.SOCK_RAW, ABSTRACT)",
    "send a datagram that does not block": "datagram(socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, ABSTRACT)",
    "make a pair of sockets for packets": "pair(socket.SOCK_SEQPACKET)",
    "fill memory that is no process's": "os.memfd_create('x')",
    "read a device": "open('/dev/zero', 'rb').read(1)",
    "leave the folder": "os.chdir(FOLDER)",
}
HARMFUL = {
    "delete a file": "os.unlink(SECRET)",
    "truncate a file": "os.truncate(SECRET, 0)",
    "rename a file": "os.rename(SECRET, FOLDER + '/renamed')",
    "overwrite a file": "open(SECRET, 'w').write('x')",
    "change the library": "open(os.path.dirname(os.__file__) + '/kedge_was_here.py', 'w')",
    "kill the parent": "os.kill(PARENT, 9)",
    "kill the real parent": "os.kill(os.getppid(), 9)",
    "kill the group": "os.killpg(0, 9)",
    "kill everything": "os.kill(-1, 9)",
    "trace the parent": "call(101, 16, PARENT, 0, 0)",
    "read the parent's memory": "call(310, PARENT, 0, 0, 0, 0, 0)",
    "replace itself": "os.execv(sys.executable, [sys.executable, '-c', 'while True: pass'])",
    "raise its limits": "resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))",
    "become root": "os.setuid(0)",
    "make a user namespace": "call(272, 0x10000000)",
    "mount": "call(165, b'none', b'/', b'tmpfs', 0, 0)",
    "change the root": "os.chroot('/lib')",
    "shared memory of the system": "call(29, 0, ctypes.c_size_t(1 << 30), 0o1600)",
    "asynchronous input and output": "call(425, 8, 0)",
    "the kernel's key ring": "call(248, b'user', b'x', b'y', 1, -3)",
    "read an inherited descriptor": "descriptors()",
    "send a datagram by ctypes": "raw_datagram(ABSTRACT)",
    "send a datagram on a stream": "datagram(socket.SOCK_STREAM, ABSTRACT)",
    "send a message with descriptors": "socket.send_fds(pair(socket.SOCK_STREAM), [b'x'], [0])",
    "raise the limit of what the kernel queues": "queue_in_the_kernel()",
    "enlarge a pipe": "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
    "make a pair of sockets of another family": "socket.socketpair(30, socket.SOCK_STREAM)",
    "look up a name": "socket.getaddrinfo('localhost', 80)",
}
# The kernel ends the process for these.
KILLED = {
    "the numbers of another system call table": "call(0x40000000 + 39)",
    "a system call of 32-bit code": "machine_code(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')",
}

# Programs that do not end, or take too much, with the reasons that may be given.
GREEDY = {
    "loop": ("while True: pass", {"took too long"}),
    "sleep": ("import time; time.sleep(1000)", {"took too long"}),
    "wait for input": ("import select; select.select([], [], [])", {"took too long"}),
    "expression without end": ("import re; re.match('(a+)+$', 'a' * 50 + 'b')", {"took too long"}),
    "large power": ("9**9**9", {"took too long", "out of memory"}),
    "ignore the limit": (
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        {"crashed", "took too long"},
    ),
    "catch everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        {"took too long"},
    ),
    "much memory": ("[0] * 10**10", {"out of memory"}),
    "growing memory": ("kept = []\nwhile True: kept.append(bytearray(10**7))", {"out of memory"}),
    "mapped memory": ("import mmap; mmap.mmap(-1, 10**10)", {"raised OSError"}),
    "endless output": ("while True: print('x' * 1000)", {"output too long"}),
    "endless errors": ("import os\nwhile True: os.write(2, b'x' * 1000)", {"output too long"}),
    "endless recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        {"out of memory", "crashed", "took too long", "raised RecursionError"},
    ),
    "fork bomb": ("import os\nwhile True: os.fork()", {"raised PermissionError"}),
    "many descriptors": ("import os\nwhile True: os.dup(0)", {"raised OSError"}),
    "read past the end": ("input()", {"raised EOFError"}),
    "exit": ("import os; os._exit(0)", {"ended early"}),
    "exit politely": ("import sys; sys.exit(0)", {"raised SystemExit"}),
    "abort": ("import os; os.abort()", {"crashed"}),
    "broken pointer": ("import ctypes; ctypes.string_at(0)", {"crashed"}),
    "closed results": ("import os; os.closerange(3, 4096)", {"ended early"}),  # whatever their number
    "own error": (
        "class PermissionError(BaseException): pass\nclass E(PermissionError): pass\nraise E",
        {"raised an error"},
    ),
    "error that cannot be shown": (
        "class E(Exception):\n    def __str__(self): raise self\nE.__name__ = 'x' * 10**7\nraise E",
        {"output too long", "raised an error"},
    ),
    "code that does not parse": ("def", {"syntax error"}),
    "code with a zero": ("\0", {"syntax error"}),
    "deep code": ("-" * 200_000 + "1", {"syntax error"}),
    "half a character": ("'\ud800'", {"syntax error"}),
}
