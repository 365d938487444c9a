//! A counter, for showing and testing functions that keep state: what it gives depends on all that it was
//! given before.

use super::network::{Network, Size};

/// What of its state the counter keeps with each request.
pub const KEPT: f32 = 0.5;
/// What it gives is so many times its state.
pub const GAIN: f32 = 2.0;

/// The counter, of any width: `x` and `h_in` FP32 [1, width] to `h_out`, which is `h_in` times [`KEPT`]
/// plus `x`, and `y`, which is `h_out` times [`GAIN`].
///
/// # Panics
/// Of no width.
#[must_use]
pub fn counter(width: usize) -> Vec<u8> {
    assert!(width > 0, "a counter of no width");
    let mut net = Network::new("counter", 0);
    let shape = [Size::Fixed(1), Size::Fixed(width)];
    let (x, before) = (net.float_input("x", &shape), net.float_input("h_in", &shape));
    let kept = net.filled("kept", width, KEPT);
    let gain = net.filled("gain", 1, GAIN);
    let left = net.node("Mul", &[&before, &kept], "left", &[]);
    let now = net.node("Add", &[&left, &x], "h_out", &[]);
    net.node("Mul", &[&now, &gain], "y", &[]);
    net.float_output("y", &shape);
    net.float_output("h_out", &shape);
    net.finish()
}
