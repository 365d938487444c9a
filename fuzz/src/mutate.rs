//! Random changes of inputs, for runs without a fuzzer.

use fastrand::Rng;

/// The length in bytes to which a changed input is cut.
const INPUT_BYTES_MAX: usize = 128 << 10;
/// The most changes of one input.
const CHANGES_MAX: usize = 6;

/// Pieces that are inserted: numbers at which readers fail, in the encodings of protobuf, MessagePack and
/// text, and fragments of these formats.
const PIECES: [&[u8]; 16] = [
    b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x00",
    b"\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\x7f\xff\xff\xff",
    b"9223372036854775807",
    b"-1",
    b"1e308",
    b"[[[[[[[[",
    b"{\"a\":",
    b"&a *a ",
    b"\x2a\x00\x2a\x00",
];

/// Returns a random input of the corpus with a few random changes.
///
/// # Panics
/// Panics if the corpus is empty.
pub fn mutated(corpus: &[Vec<u8>], random: &mut Rng) -> Vec<u8> {
    let mut input = random.choice(corpus).expect("the corpus is not empty").clone();
    for _ in 0..random.usize(1..=CHANGES_MAX) {
        change(&mut input, corpus, random);
    }
    input.truncate(INPUT_BYTES_MAX);
    input
}

fn change(input: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Rng) {
    let at = random.usize(..=input.len());
    let to = random.usize(at..=input.len().min(at + 64));
    match random.u8(..8) {
        0 if at < input.len() => input[at] ^= 1 << random.u8(..8),
        1 if at < input.len() => input[at] = random.u8(..),
        2 => input.truncate(at),
        3 => drop(input.drain(at..to)),
        4 => {
            let again = input[at..to].repeat(random.usize(1..64));
            drop(input.splice(at..at, again));
        }
        5 => {
            let piece = random.choice(PIECES).expect("the list of pieces is not empty");
            let end = if random.bool() { at } else { input.len().min(at + piece.len()) };
            drop(input.splice(at..end, piece.iter().copied()));
        }
        6 => {
            let other = random.choice(corpus).expect("the corpus is not empty");
            let from = random.usize(..=other.len());
            drop(input.splice(at.., other[from..].iter().copied()));
        }
        _ => {
            let bytes: Vec<_> = std::iter::repeat_with(|| random.u8(..)).take(to - at + 1).collect();
            drop(input.splice(at..to, bytes));
        }
    }
}
