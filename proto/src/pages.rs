//! The byte budget of a page. Lists are cut into pages by bytes as well as by items, so that every
//! response stays below the size that clients accept.

use millrace_types::limits::PAGE_BYTES_MAX;
use prost::Message;
use prost::encoding::encoded_len_varint;

/// The remaining bytes of a page.
#[derive(Debug, Clone)]
pub struct PageBudget {
    left: usize,
    is_empty: bool,
}

impl Default for PageBudget {
    fn default() -> Self {
        Self::of(PAGE_BYTES_MAX)
    }
}

impl PageBudget {
    /// Creates a budget of this many bytes of items.
    #[must_use]
    pub fn of(bytes: usize) -> Self {
        Self { left: bytes, is_empty: true }
    }

    /// Reserves the bytes of a list item if the item fits. Returns whether it does. The first item
    /// always fits: an item larger than a page is alone on its page.
    pub fn take(&mut self, item: &impl Message) -> bool {
        let bytes = item.encoded_len();
        self.take_bytes(bytes + encoded_len_varint(bytes as u64) + 1)
    }

    /// Reserves the bytes of an item of this size, like [`Self::take`].
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
    fn the_first_item_always_fits_and_later_items_within_the_budget() {
        let text = |len: usize| "x".repeat(len);
        let mut room = PageBudget::of(100);
        assert!(room.take(&text(500)) && !room.take(&text(1)));
        let mut room = PageBudget::of(100);
        assert!(room.take(&text(40)) && room.take(&text(40)) && !room.take(&text(40)));
        assert!(room.take(&text(1)), "a smaller item may still fit");
    }
}
