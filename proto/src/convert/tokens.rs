//! Conversions of the SMs of a token.

use millrace_types::{SmPercent, SmShare, UnitSet};

use crate::executor::{UnitBlock, token::On};

/// Converts the SMs of a token. Returns `None` for SMs that no GPU has: a block that is not aligned or beyond the
/// last unit, or a percentage outside 1 to 100.
#[must_use]
pub fn sm_share(on: Option<On>) -> Option<SmShare> {
    let unit = |number: u32| u8::try_from(number).ok();
    Some(match on? {
        On::Block(block) => SmShare::Block(UnitSet::block(unit(block.first)?, unit(block.width)?)?),
        On::Percent(percent) => SmShare::Cap(SmPercent::new(unit(percent)?)?),
    })
}

/// Encodes the SMs of a token.
#[must_use]
pub fn sm_share_wire(on: SmShare) -> On {
    match on {
        SmShare::Block(block) => {
            On::Block(UnitBlock { first: block.first().into(), width: block.width().into() })
        }
        SmShare::Cap(percent) => On::Percent(percent.get().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sms_of_a_token_survive_the_wire() {
        let blocks = (0..16).flat_map(|first| [1, 2, 4, 8, 16].map(|width| UnitSet::block(first, width)));
        let shares = blocks.flatten().map(SmShare::Block);
        for share in shares.chain((1..=100).filter_map(SmPercent::new).map(SmShare::Cap)) {
            assert_eq!(sm_share(Some(sm_share_wire(share))), Some(share));
        }
    }

    #[test]
    fn sms_that_no_gpu_has_are_refused() {
        let block = |first, width| On::Block(UnitBlock { first, width });
        let refused = [block(3, 4), block(16, 1), block(0, 32), block(u32::MAX, 1), block(0, 0)];
        for on in refused.into_iter().chain([0, 101, 257].map(On::Percent)) {
            assert_eq!(sm_share(Some(on)), None, "{on:?}");
        }
        assert_eq!(sm_share(None), None);
    }
}
