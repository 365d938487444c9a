//! The order in which idle models are evicted from host memory. Models on no GPU go first, pinned models
//! and models with warm copies go last, and ties go to the least recently used. Prewarming never evicts a
//! pinned model or a model with warm copies. The code is pure: callers pass the idle models.

use millrace_types::{Bytes, Digest, Timestamp};

use super::plan::RoomPurpose;

/// A model in host memory that no request uses. The derived order is the order of eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct IdleModel {
    /// Whether the model is pinned or has warm copies.
    pub(super) stays: bool,
    /// Whether a GPU holds the model. A request that runs there would load the model into host memory
    /// again.
    pub(super) on_gpu: bool,
    pub(super) last_used: Timestamp,
    pub(super) digest: Digest,
    pub(super) bytes: Bytes,
}

/// Returns the models to evict so that `bytes` are freed, or none if all evictable models are not enough.
pub(super) fn models_to_evict(mut unused: Vec<IdleModel>, asker: RoomPurpose, bytes: Bytes) -> Vec<Digest> {
    unused.retain(|model| asker == RoomPurpose::Request || !model.stays);
    unused.sort_unstable();
    let mut freed = Bytes::ZERO;
    let mut leaving = Vec::new();
    for model in unused {
        if freed >= bytes {
            break;
        }
        freed += model.bytes;
        leaving.push(model.digest);
    }
    if freed < bytes {
        leaving.clear();
    }
    leaving
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns models of 10 bytes each, used in order. The first model is pinned, the second is on a GPU.
    fn unused(models: u8) -> Vec<IdleModel> {
        let model = |number: u8| IdleModel {
            stays: number == 0,
            on_gpu: number == 1,
            last_used: Timestamp(u64::from(number)),
            digest: digest(number),
            bytes: Bytes(10),
        };
        (0..models).map(model).collect()
    }

    fn digest(number: u8) -> Digest {
        Digest::of(&[number])
    }

    #[test]
    fn models_leave_in_order_and_none_leaves_if_all_are_not_enough() {
        let left = |bytes| models_to_evict(unused(4), RoomPurpose::Request, Bytes(bytes));
        assert_eq!(left(10), [digest(2)]);
        assert_eq!(left(21), [digest(2), digest(3), digest(1)]);
        assert_eq!(left(40), [digest(2), digest(3), digest(1), digest(0)]);
        assert_eq!(left(41), []);
    }

    #[test]
    fn a_pinned_model_makes_room_for_requests_but_not_for_hints() {
        let left = |asker| models_to_evict(unused(1), asker, Bytes(10));
        assert_eq!((left(RoomPurpose::Hint), left(RoomPurpose::Request)), (vec![], vec![digest(0)]));
        assert_eq!(models_to_evict(unused(4), RoomPurpose::Hint, Bytes(30)).len(), 3);
        assert_eq!(models_to_evict(unused(4), RoomPurpose::Hint, Bytes(31)), []);
    }
}
