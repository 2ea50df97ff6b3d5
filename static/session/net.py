"""Take all of a pod's network but the loopback away, and wait for the proxy of a session.

    python3 -I -S net.py closed|open SOCKET

An interface that is down has no routes, and no address of IPv6; only NET_ADMIN sets it up again.
SOCKET is that of the proxy, empty where there is none.
"""

import fcntl
import socket
import struct
import sys
import time

network, gate = sys.argv[1:]
with socket.socket() as any_one:
    for _, name in socket.if_nameindex() if network == "closed" else ():
        if name != "lo":
            fcntl.ioctl(any_one, 0x8914, struct.pack("16sh22x", name.encode(), 0))  # SIOCSIFFLAGS
for _ in range(1200 if gate else 0):
    with socket.socket(socket.AF_UNIX) as sock:
        if not sock.connect_ex(gate):
            sys.exit()
    time.sleep(0.1)
if gate:
    sys.exit("sandbox: the proxy of the session does not answer; its claim must be on a file "
             "system that carries sockets between two pods of a node")
