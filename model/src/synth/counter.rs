//! A counter, for demonstrating and testing functions that keep state: its output depends on all
//! earlier inputs.

use super::network::{DeclaredDim, GraphWriter};

/// Factor by which the counter multiplies its state at each request.
pub const KEPT: f32 = 0.5;
/// Factor from the state to the output.
pub const GAIN: f32 = 2.0;

/// Returns a counter of any width. It maps `x` and `h_in` FP32 [1, width] to `h_out`, which is `h_in`
/// times [`KEPT`] plus `x`, and to `y`, which is `h_out` times [`GAIN`].
///
/// # Panics
/// Panics if `width` is 0.
#[must_use]
pub fn counter(width: usize) -> Vec<u8> {
    assert!(width > 0, "a counter of no width");
    let mut net = GraphWriter::new("counter", 0);
    let shape = [DeclaredDim::Fixed(1), DeclaredDim::Fixed(width)];
    let x = net.float_input("x", &shape);
    let before = net.float_input("h_in", &shape);
    let kept = net.filled("kept", width, KEPT);
    let gain = net.filled("gain", 1, GAIN);
    let left = net.node("Mul", &[&before, &kept], "left", &[]);
    let now = net.node("Add", &[&left, &x], "h_out", &[]);
    net.node("Mul", &[&now, &gain], "y", &[]);
    net.float_output("y", &shape);
    net.float_output("h_out", &shape);
    net.finish()
}
