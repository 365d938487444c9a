//! How much fits one answer: lists are cut into pages by bytes as well as by items, so that every answer
//! stays below what clients take.

use millrace_types::limits::PAGE_BYTES_MAX;
use prost::Message;
use prost::encoding::encoded_len_varint;

/// The bytes that are left of an answer.
#[derive(Debug, Clone)]
pub struct PageRoom {
    left: usize,
    is_empty: bool,
}

impl Default for PageRoom {
    fn default() -> Self {
        Self::of(PAGE_BYTES_MAX)
    }
}

impl PageRoom {
    /// Room for so many bytes of items.
    #[must_use]
    pub fn of(bytes: usize) -> Self {
        Self { left: bytes, is_empty: true }
    }

    /// Takes the room of an item of a list, if the item fits. The first item always does: one that is
    /// larger than a page is alone on its page.
    pub fn take(&mut self, item: &impl Message) -> bool {
        let bytes = item.encoded_len();
        self.take_bytes(bytes + encoded_len_varint(bytes as u64) + 1)
    }

    /// Takes the room of an item of this size, as [`Self::take`] does.
    pub fn take_bytes(&mut self, bytes: usize) -> bool {
        if bytes > self.left && !self.is_empty {
            return false;
        }
        self.left = self.left.saturating_sub(bytes);
        self.is_empty = false;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_taken_while_they_fit_and_the_first_one_always() {
        let text = |len: usize| "x".repeat(len);
        let mut room = PageRoom::of(100);
        assert!(room.take(&text(500)) && !room.take(&text(1)));
        let mut room = PageRoom::of(100);
        assert!(room.take(&text(40)) && room.take(&text(40)) && !room.take(&text(40)));
        assert!(room.take(&text(1)), "a smaller item may still fit");
    }
}
