//! Compiles hostile bytes: there is never a panic, and an accepted model is consistent.

use proptest::prelude::*;

use super::runner::region;
use super::*;
use crate::{ALIGNMENT, MAX_LAUNCHES, compile};

/// Checks the properties of every model that compiles.
fn check(file: Vec<u8>) {
    let file = Bytes::from(file);
    let Ok(compiled) = compile(&file) else { return };
    let bytes = compiled.summary.weights_bytes;
    assert!(bytes <= 8 * file.len() as u64 + 8 * ALIGNMENT, "{bytes} bytes of weights from a small file");
    // `region` panics if a weight lies outside the region or outside the file.
    region(&compiled, &file);
    assert!((1..=MAX_LAUNCHES).contains(&compiled.launches.len()));
    let mut known: Vec<&String> = compiled.summary.inputs.iter().map(|input| &input.name).collect();
    for launch in &compiled.launches {
        assert!(launch.args.iter().all(|arg| known.contains(&arg)));
        assert!(launch.reads.iter().all(|read| read.start < read.end && read.end <= bytes));
        known.extend(&launch.writes);
    }
    assert!(compiled.summary.outputs.iter().all(|output| known.contains(&&output.name)));
}

fn seeds() -> Vec<Vec<u8>> {
    let typed = with(|graph| {
        graph.initializer[0].raw_data = None;
        graph.initializer[0].float_data = vec![1.0; 16];
    });
    [model(), choosing(), typed].iter().map(Message::encode_to_vec).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_compile_consistently_or_are_refused(file in proptest::collection::vec(any::<u8>(), 0..256)) {
        check(file.clone());
        // The prefix passes the check of the first byte, which most random files fail.
        check([&[0x08, 9, 0x3a][..], &file].concat());
    }

    #[test]
    fn a_model_with_changed_bytes_is_consistent_or_refused(seed in 0usize..3, changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut file = seeds().swap_remove(seed);
        for (place, byte) in changes {
            let place = place.index(file.len());
            file[place] = byte;
        }
        check(file);
    }

    #[test]
    fn a_model_with_flipped_bits_is_consistent_or_refused(seed in 0usize..3, place in any::<prop::sample::Index>(), bit in 0u32..8) {
        let mut file = seeds().swap_remove(seed);
        let place = place.index(file.len());
        file[place] ^= 1 << bit;
        check(file);
    }

    #[test]
    fn a_model_with_a_removed_or_repeated_part_is_consistent_or_refused(seed in 0usize..3, from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>(), times in 0usize..4) {
        let file = seeds().swap_remove(seed);
        let first = from.index(file.len());
        let second = to.index(file.len());
        let from = first.min(second);
        let to = first.max(second);
        check([&file[..from], &file[from..to].repeat(times), &file[to..]].concat());
    }
}
