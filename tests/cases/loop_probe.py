"""Asks a server for /livez on one connection, again and again, until standard input ends; prints how long each took.

A process of its own, so that nothing which the test does is in the times.
"""

import json
import select
import sys
import time
from http.client import HTTPConnection


def main(host: str, port: int, every_s: float) -> None:
    connection = HTTPConnection(host, port, timeout=60)
    seconds = []
    while not select.select([sys.stdin], [], [], every_s)[0]:
        start_s = time.perf_counter()
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        seconds.append(time.perf_counter() - start_s)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
