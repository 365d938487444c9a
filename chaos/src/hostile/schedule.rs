//! The schedule of the attacks: every attack in turns, in an order drawn from the seed, then all of
//! them together. Pure.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use super::attacks::Attack;

/// The part of the time in which attacks run in turns: two thirds.
const IN_TURNS: (u32, u32) = (2, 3);

/// Attacks that run at the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AttackTurn {
    pub(super) attacks: Vec<Attack>,
    pub(super) lasts: Duration,
}

/// Returns the turns of the attacks, whose durations add up to `lasts`.
pub(super) fn turns(attacks: &[Attack], lasts: Duration, rng: &mut StdRng) -> Vec<AttackTurn> {
    let (part, of) = IN_TURNS;
    let in_turns = lasts * part / of;
    let count = u32::try_from(attacks.len()).unwrap_or(u32::MAX).max(1);
    let mut order = attacks.to_vec();
    order.shuffle(rng);
    // Foreign requests run last, because a server that obeys them stops the function that the other
    // attacks name.
    order.sort_by_key(|&attack| attack == Attack::Foreign);
    let alone = order.iter().map(|&attack| AttackTurn { attacks: vec![attack], lasts: in_turns / count });
    let together = AttackTurn { attacks: order.clone(), lasts: lasts - in_turns };
    alone.chain([together]).collect()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    fn of(seed: u64) -> Vec<AttackTurn> {
        turns(&Attack::ALL, Duration::from_secs(90), &mut StdRng::seed_from_u64(seed))
    }

    #[test]
    fn every_attack_has_a_turn_before_all_attacks_run_together() {
        let turns = of(1);
        let (together, alone) = turns.split_last().unwrap();
        let mut each: Vec<_> = alone.iter().map(|turn| turn.attacks[0]).collect();
        each.sort_unstable();
        let mut all = Attack::ALL.to_vec();
        all.sort_unstable();
        assert_eq!(each, all);
        assert_eq!((together.attacks.len(), together.lasts), (Attack::ALL.len(), Duration::from_secs(30)));
        let lasts: Duration = turns.iter().map(|turn| turn.lasts).sum();
        assert!(lasts <= Duration::from_secs(90) && lasts > Duration::from_secs(89), "{lasts:?}");
    }

    #[test]
    fn the_order_of_attacks_depends_on_the_seed_alone() {
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }
}
