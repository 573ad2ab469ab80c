"""Convert a trained model to float16, save it, export it to ONNX and serve it over HTTP.

Shows: `convert` with a batch size that may change, its casts and errors; a `.pt2` file that loads
without running code; `export_onnx`; onnxruntime behind the HTTP server of Python's library.

    python examples/convert_and_serve.py                         # train, convert, one request
    python examples/convert_and_serve.py --serve --port 8000     # then answer until Ctrl-C
    curl -d '{"images": [[0, 0, 5, ...]]}' localhost:8000        # 64 pixels from 0 to 16

Prints what each file takes and how its outputs differ from the float32 model:

    weights.pt    78,588 bytes, test accuracy 84.4%, largest difference of a logit 0.0000
    model.pt2     40,521 bytes, test accuracy 84.4%, largest difference of a logit 0.0110
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mezzo

Predict = Callable[[Tensor], Tensor]


def make_model(width: int) -> nn.Module:
    """Return a network for images of 8 × 8 pixels, with 64 numbers from 0 to 16."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.BatchNorm2d(1), nn.Conv2d(1, width, 3, padding=1)),
        *(nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * width, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def train(images: Tensor, digits: Tensor, options: argparse.Namespace) -> nn.Module:
    """Train at O2, and return the model in float32 on the CPU."""
    model = make_model(options.width).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = mezzo.TrainStep(model, nn.CrossEntropyLoss(), optimizer, "O2")
    for _ in range(options.epochs):
        for batch in torch.randperm(len(images)).split(64):
            step(images[batch], digits[batch])
    print(f"trained: loss {step.loss:.3f} after {options.epochs} epochs")
    # onnxruntime runs on the CPU here: convert where the model will run.
    return mezzo.undecorate(model).cpu().eval()


def convert(model: nn.Module, example: Tensor, folder: Path) -> None:
    """Convert to float16, and write model.pt2 and model.onnx."""
    sizes = ({0: torch.export.Dim("batch", min=1, max=1024)},)
    converted = mezzo.convert(model, (example,), dtype="float16", dynamic_shapes=sizes)
    print(converted.casts)
    print(converted.compare(example))
    converted.save(folder / "model.pt2")
    converted.export_onnx(folder / "model.onnx")


def onnx_predictor(path: Path) -> Predict:
    """Return a function that runs an ONNX file."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def make_server(predict: Predict, port: int) -> ThreadingHTTPServer:
    """Return a server that answers `{"images": [[...]]}` with `{"digits": [...]}`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Answer one request; what is no batch of images is a bad request."""
            try:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                logits = predict(torch.tensor(request["images"], dtype=torch.float32))
                status, answer = 200, {"digits": logits.argmax(dim=1).tolist()}
            except Exception as error:  # noqa: BLE001 - one bad request must not end the server
                status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def ask(server: ThreadingHTTPServer, images: Tensor) -> list[int]:
    """Send images to a server, and return the digits that it answers."""
    body = json.dumps({"images": images.tolist()}).encode()
    address = f"http://127.0.0.1:{server.server_port}"
    with urllib.request.urlopen(address, body, timeout=30) as answer:
        digits: list[int] = json.load(answer)["digits"]
    return digits


def parse_arguments() -> argparse.Namespace:
    """Return the options; `--tiny` is what the tests run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs/convert_and_serve"))
    parser.add_argument("--serve", action="store_true", help="answer requests until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="0 chooses a free one")
    parser.add_argument("--tiny", action="store_true", help="width 8, 3 epochs")
    options = parser.parse_args()
    if options.tiny:
        options.width, options.epochs = 8, 3
    return options


def main() -> None:
    """Train, convert, compare and serve."""
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    images, digits = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float()
    test, wanted = images[:256], digits[:256]
    model = train(images[256:], digits[256:], options)
    torch.save(model.state_dict(), options.out / "weights.pt")
    convert(model, test[:8], options.out)

    loaded = mezzo.Converted.load(options.out / "model.pt2")
    predict = onnx_predictor(options.out / "model.onnx")
    with torch.no_grad():
        expected = model(test)
    rows = {"weights.pt": expected, "model.pt2": loaded(test), "model.onnx": predict(test)}
    for name, logits in rows.items():
        size = (options.out / name).stat().st_size
        accuracy = (logits.argmax(dim=1) == wanted).float().mean()
        difference = (logits - expected).abs().max()
        right = f"test accuracy {accuracy:.1%}, largest difference of a logit {difference:.4f}"
        print(f"{name:<11}{size:>9,} bytes, {right}")

    with make_server(predict, options.port) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        answer = ask(server, test[:8])
        print(f"port {server.server_port} answers {answer}; the digits are {wanted[:8].tolist()}")
        if options.serve:
            try:
                thread.join()
            except KeyboardInterrupt:
                print("stopped")
        server.shutdown()


if __name__ == "__main__":
    main()
