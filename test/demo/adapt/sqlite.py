"""A server that writes to SQLite for each connection. Usage: sqlite.py ADDRESS PORT DIRECTORY"""
import os, socket, sqlite3, sys, threading

address, port, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
path = os.path.join(directory, "db")
with sqlite3.connect(path) as db:
    db.execute("CREATE TABLE visits (id INTEGER PRIMARY KEY, text)")
    db.executemany("INSERT INTO visits (text) VALUES (?)", [("x" * 100,)] * 2000)


def serve(c):
    try:
        if not c.recv(1):
            return
        db = sqlite3.connect(path, timeout=20, isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        db.execute("SELECT max(text) FROM visits").fetchone()
        db.execute("INSERT INTO visits (text) VALUES ('y')")
        db.execute("COMMIT")
        db.close()
        c.sendall(b"a")
    except (OSError, sqlite3.Error) as e:
        print(e, file=sys.stderr, flush=True)
    finally:
        c.close()


l = socket.create_server((address, port), backlog=1024)
while True:
    threading.Thread(target=serve, args=(l.accept()[0],), daemon=True).start()
