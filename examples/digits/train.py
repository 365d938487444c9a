"""Trains the digits classifier, and writes the files of this folder: the model, test images and held-out rows.

    python3 -m venv venv && venv/bin/pip install onnx scikit-learn pillow onnxruntime
    venv/bin/python train.py

The data are the 1,797 digits of 8x8 pixels that scikit-learn includes, so nothing is downloaded. The same
versions of the packages write the same files.
"""

import csv
import pathlib
import platform

import numpy
import onnx
import onnxruntime
import PIL
import sklearn
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

HERE = pathlib.Path(__file__).parent
SEED = 7
HELD_OUT = 360
ROWS = 100  # held-out images that are committed, so that a test can check the model
SCALE = 8  # factor of enlargement, because 8x8 pixels are too small to view


def train():
    digits = load_digits()
    pixels = numpy.round(digits.data / 16 * 255).astype(numpy.uint8)  # the range of a PNG
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, digits.target, test_size=HELD_OUT, random_state=SEED, stratify=digits.target
    )
    classifier = MLPClassifier((128, 64), alpha=1e-2, max_iter=400, random_state=SEED)
    classifier.fit(train_x / 255, train_y)
    return classifier, test_x, test_y


def export(classifier):
    """Writes the model: image [N, 1, 8, 8] in 0..1 -> probabilities [N, 10] and label [N]."""
    nodes = [helper.make_node("Flatten", ["image"], ["pixels"], axis=1)]
    weights = []
    value = "pixels"
    layers = list(zip(classifier.coefs_, classifier.intercepts_))
    for number, (weight, bias) in enumerate(layers):
        names = [f"layer{number}.weight", f"layer{number}.bias"]
        for name, array in zip(names, (weight, bias)):
            weights.append(numpy_helper.from_array(array.astype(numpy.float32), name))
        nodes.append(helper.make_node("Gemm", [value, *names], [f"layer{number}"]))
        value = f"layer{number}"
        if number + 1 < len(layers):
            nodes.append(helper.make_node("Relu", [value], [f"{value}.active"]))
            value = f"{value}.active"
    nodes.append(helper.make_node("Softmax", [value], ["probabilities"], axis=-1))
    nodes.append(helper.make_node("ArgMax", ["probabilities"], ["label"], axis=1, keepdims=0))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "digits",
        [info("image", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [info("probabilities", TensorProto.FLOAT, ["N", 10]), info("label", TensorProto.INT64, ["N"])],
        weights,
    )
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, producer_name="millrace-examples", opset_imports=opset, ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    path = HERE / "digits.onnx"
    onnx.save(model, path)
    return path


def write_rows(test_x, test_y):
    with open(HERE / "held_out.csv", "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["label", *(f"p{index}" for index in range(64))])
        for pixels, label in zip(test_x[:ROWS], test_y[:ROWS]):
            rows.writerow([label, *pixels])


def write_images(test_x, test_y):
    folder = HERE / "images"
    folder.mkdir(exist_ok=True)
    for digit in range(10):
        pixels = test_x[ROWS:][test_y[ROWS:] == digit][0].reshape(8, 8)
        image = Image.fromarray(pixels).resize((8 * SCALE, 8 * SCALE), Image.Resampling.NEAREST)
        image.save(folder / f"digit-{digit}.png", optimize=True)


def main():
    classifier, test_x, test_y = train()
    path = export(classifier)
    write_rows(test_x, test_y)
    write_images(test_x, test_y)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = (test_x / 255).astype(numpy.float32).reshape(-1, 1, 8, 8)
    labels = session.run(["label"], {"image": images})[0]
    print(f"held out: {(labels == test_y).mean():.4f} of {len(test_y)} images")
    print(f"held_out.csv: {(labels[:ROWS] == test_y[:ROWS]).sum()} of {ROWS} rows")
    print(f"digits.onnx: {path.stat().st_size} bytes")
    versions = [("Python", platform.python_version())]
    versions += [(module.__name__, module.__version__) for module in (numpy, sklearn, onnx, onnxruntime, PIL)]
    print(", ".join(" ".join(version) for version in versions))


if __name__ == "__main__":
    main()
