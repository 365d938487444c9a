//! Image operations without learned weights, such as an image library performs on a GPU.

use super::network::{Attribute, GraphWriter};
use crate::onnx::element;

/// Number of colour channels: red, green and blue.
pub(super) const COLOURS: usize = 3;

/// Converts bytes [N, H, W, 3] to numbers from 0 to 1, channel by channel: [N, 3, H, W].
pub(super) fn planes(net: &mut GraphWriter, pixels: &str, output: &str) -> String {
    let part = |suffix: &str| format!("{output}.{suffix}");
    let to = [Attribute::Int("to", i64::from(element::FLOAT))];
    let numbers = net.node("Cast", &[pixels], &part("numbers"), &to);
    let order = [Attribute::Ints("perm", &[0, 3, 1, 2])];
    let turned = net.node("Transpose", &[&numbers], &part("planes"), &order);
    let scale = net.scalar(&part("scale"), 1.0 / 255.0);
    net.node("Mul", &[&turned, &scale], output, &[])
}

/// Converts numbers [N, 3, H, W] to bytes [N, H, W, 3]: the inverse of [`planes`].
pub(super) fn bytes(net: &mut GraphWriter, image: &str, output: &str) -> String {
    let part = |suffix: &str| format!("{output}.{suffix}");
    let order = [Attribute::Ints("perm", &[0, 2, 3, 1])];
    let turned = net.node("Transpose", &[image], &part("rows"), &order);
    let full = net.scalar(&part("full"), 255.0);
    let scaled = net.node("Mul", &[&turned, &full], &part("scaled"), &[]);
    let none = net.scalar(&part("none"), 0.0);
    let kept = net.node("Clip", &[&scaled, &none, &full], &part("kept"), &[]);
    let to = [Attribute::Int("to", i64::from(element::UINT8))];
    net.node("Cast", &[&kept], output, &to)
}

/// Adds the mean of each `factor` × `factor` pixels.
pub(super) fn shrink(net: &mut GraphWriter, image: &str, factor: usize, output: &str) -> String {
    pool(net, "AveragePool", image, factor, factor, output)
}

/// Adds a pool over adjacent windows of this height and width.
pub(super) fn pool(
    net: &mut GraphWriter,
    kind: &str,
    image: &str,
    height: usize,
    width: usize,
    output: &str,
) -> String {
    let window = [height as i64, width as i64];
    let attributes = [Attribute::Ints("kernel_shape", &window), Attribute::Ints("strides", &window)];
    net.node(kind, &[image], output, &attributes)
}

/// Repeats each pixel `factor` times in both directions.
pub(super) fn enlarge(net: &mut GraphWriter, image: &str, factor: usize, output: &str) -> String {
    let factor = factor as f32;
    let scales = net.floats(&format!("{output}.scales"), &[4], &[1.0, 1.0, factor, factor]);
    // Nearest is Resize's default mode.
    net.node("Resize", &[image, "", &scales], output, &[])
}

/// Adds a Gaussian filter of `side` × `side` taps over each channel. The filter is applied in one
/// direction after the other.
pub(super) fn blur(net: &mut GraphWriter, image: &str, side: usize, output: &str) -> String {
    let deviation = side as f32 / 4.0;
    let tap = |at: usize| (-((at as f32 - (side / 2) as f32) / deviation).powi(2) / 2.0).exp();
    let total: f32 = (0..side).map(tap).sum();
    let taps: Vec<f32> = (0..COLOURS).flat_map(|_| (0..side).map(|at| tap(at) / total)).collect();
    let half = (side / 2) as i64;
    let mut pass = |input: &str, name: &str, shape: [usize; 2], pads: [i64; 4], output: &str| {
        let weight = net.floats(name, &[COLOURS, 1, shape[0], shape[1]], &taps);
        let kernel = shape.map(|taps| taps as i64);
        let attributes = [
            Attribute::Ints("kernel_shape", &kernel),
            Attribute::Ints("pads", &pads),
            Attribute::Int("group", COLOURS as i64),
        ];
        net.node("Conv", &[input, &weight], output, &attributes)
    };
    let part = |suffix: &str| format!("{output}.{suffix}");
    let rows = pass(image, &part("across"), [1, side], [0, half, 0, half], &part("rows"));
    pass(&rows, &part("down"), [side, 1], [half, 0, half, 0], output)
}

/// Adds a weighted sum of the channels for each row of `weights`: [N, 3, H, W] to [N, rows, H, W].
pub(super) fn mix(net: &mut GraphWriter, image: &str, weights: &[[f32; COLOURS]], output: &str) -> String {
    let weight =
        net.floats(&format!("{output}.weights"), &[weights.len(), COLOURS, 1, 1], weights.as_flattened());
    net.node("Conv", &[image, &weight], output, &[Attribute::Ints("kernel_shape", &[1, 1])])
}

/// Cuts each of `count` pictures of `rows` × `across` square cells of `side` pixels into its cells,
/// row by row: [count, 3, H, W] to [count · rows · across, 3, side, side].
pub(super) fn cells(
    net: &mut GraphWriter,
    image: &str,
    count: usize,
    rows: usize,
    across: usize,
    side: usize,
    output: &str,
) -> String {
    let part = |suffix: &str| format!("{output}.{suffix}");
    let of = |sizes: &[usize]| sizes.iter().map(|&size| size as i64).collect::<Vec<_>>();
    let grid = net.int64s(&part("grid"), &of(&[count, COLOURS, rows, side, across, side]));
    let apart = net.node("Reshape", &[image, &grid], &part("apart"), &[]);
    let order = [Attribute::Ints("perm", &[0, 2, 4, 1, 3, 5])];
    let turned = net.node("Transpose", &[&apart], &part("in_order"), &order);
    let list = net.int64s(&part("list"), &of(&[count * rows * across, COLOURS, side, side]));
    net.node("Reshape", &[&turned, &list], output, &[])
}

/// Selects the entries of `list` along `axis` whose score in `scores` [1, rows] is above `threshold`,
/// as `output`, which may be empty. `any` INT64 `[1]` is 1 if there is such an entry.
pub(super) fn choose(
    net: &mut GraphWriter,
    list: &str,
    axis: i64,
    scores: &str,
    threshold: f32,
    output: &str,
    any: Option<&str>,
) {
    let part = |suffix: &str| format!("{output}.{suffix}");
    let threshold = net.scalar(&part("threshold"), threshold);
    let above = net.node("Greater", &[scores, &threshold], &part("above"), &[]);
    let to = [Attribute::Int("to", i64::from(element::INT64))];
    let marks = net.node("Cast", &[&above], &part("marks"), &to);
    // NonZero makes a column for each mark: the row, which is always 0, and the position in the row.
    let found = net.node("NonZero", &[&marks], &part("found"), &[]);
    let second = net.int64s(&part("second"), &[1]);
    let found = net.node("Gather", &[&found, &second], &part("places.row"), &[Attribute::Int("axis", 0)]);
    let first = net.int64s(&part("first"), &[0]);
    let places = net.node("Squeeze", &[&found, &first], &part("places"), &[]);
    net.node("Gather", &[list, &places], output, &[Attribute::Int("axis", axis)]);
    if let Some(any) = any {
        let over = [Attribute::Ints("axes", &[1]), Attribute::Int("keepdims", 0)];
        net.node("ReduceMax", &[&marks], any, &over);
    }
}
