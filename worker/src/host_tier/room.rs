//! Who leaves host memory when another needs the room: of those that no request uses, the ones that no
//! GPU holds before the others, what is pinned or kept warm last, and of equals the least recently used.
//! A hint makes room of what is neither pinned nor kept warm alone. Pure: callers say what is there.

use millrace_types::{Bytes, Digest, Timestamp};

use super::plan::Asker;

/// A model in host memory that no request uses; in the order in which they leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Unused {
    /// Whether it is pinned or kept warm.
    pub(super) stays: bool,
    /// Whether a GPU holds it: it may be asked for there, and would come again.
    pub(super) on_gpu: bool,
    pub(super) last_used: Timestamp,
    pub(super) digest: Digest,
    pub(super) bytes: Bytes,
}

/// Those that leave so that `bytes` are free; none where all that may are not enough.
pub(super) fn leaving(mut unused: Vec<Unused>, asker: Asker, bytes: Bytes) -> Vec<Digest> {
    unused.retain(|model| asker == Asker::Request || !model.stays);
    unused.sort_unstable();
    let (mut freed, mut leaving) = (Bytes::ZERO, Vec::new());
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

    /// So many models of ten bytes each, used in this order: the first is pinned, the second on a GPU.
    fn unused(models: u8) -> Vec<Unused> {
        let model = |number: u8| {
            let (stays, on_gpu) = (number == 0, number == 1);
            let last_used = Timestamp(u64::from(number));
            Unused { stays, on_gpu, last_used, digest: digest(number), bytes: Bytes(10) }
        };
        (0..models).map(model).collect()
    }

    fn digest(number: u8) -> Digest {
        Digest::of(&[number])
    }

    #[test]
    fn those_leave_first_that_are_missed_least_and_none_where_all_are_not_enough() {
        let left = |bytes| leaving(unused(4), Asker::Request, Bytes(bytes));
        assert_eq!(left(10), [digest(2)]);
        assert_eq!(left(21), [digest(2), digest(3), digest(1)]);
        assert_eq!(left(40), [digest(2), digest(3), digest(1), digest(0)]);
        assert_eq!(left(41), []);
    }

    #[test]
    fn what_is_pinned_makes_room_for_requests_alone() {
        let left = |asker| leaving(unused(1), asker, Bytes(10));
        assert_eq!((left(Asker::Hint), left(Asker::Request)), (vec![], vec![digest(0)]));
        assert_eq!(leaving(unused(4), Asker::Hint, Bytes(30)).len(), 3);
        assert_eq!(leaving(unused(4), Asker::Hint, Bytes(31)), []);
    }
}
