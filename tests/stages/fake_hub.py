"""A Hugging Face Hub on loopback: what huggingface_hub asks of it, for one folder per repository."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves `repositories` (name: folder); `asked` lists the requests. Data sets are named `datasets/NAME`."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        hub, self.asked, self.tokens = self, [], set()

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                path = self.path.partition("?")[0].strip("/")
                hub.asked.append(f"{self.command} {path}")
                hub.tokens.add(self.headers.get("Authorization"))
                for name, folder in repositories.items():
                    api = f"api/{name if name.startswith('datasets/') else f'models/{name}'}"
                    if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                        return self.send(json.dumps(self.about(name, folder)).encode(), body)
                    if path == f"{api}/tree/{COMMIT}":
                        tree = [{"type": "file", "path": item["rfilename"], "size": item["size"], "oid": "0"}
                                for item in self.about(name, folder)["siblings"]]  # fmt: skip
                        return self.send(json.dumps(tree).encode(), body)
                    place = f"{name}/resolve/"
                    if path.startswith(place):
                        file = folder / path[len(place) :].partition("/")[2]
                        if file.is_file():
                            return self.send(file.read_bytes(), body)
                return self.send(b"{}", body, 404)

            def about(self, name: str, folder: Path) -> dict:
                files = sorted(path for path in folder.rglob("*") if path.is_file())
                siblings = [{"rfilename": str(file.relative_to(folder)), "size": file.stat().st_size} for file in files]
                return {"id": name.removeprefix("datasets/"), "sha": COMMIT, "siblings": siblings, "tags": [],
                        "private": False, "downloads": 0, "likes": 0}  # fmt: skip

            def send(self, data: bytes, body: bool, code: int = 200) -> None:
                first = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
                self.send_response(206 if first else code)
                for key, value in {
                    "Content-Length": str(len(data) - first), "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
                    "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes", "Content-Type": "application/json",
                    "Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}",
                }.items():  # fmt: skip
                    self.send_header(key, value)
                self.end_headers()
                if body:
                    self.wfile.write(data[first:])

            def log_message(self, *_words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
