//! Access to elements as bytes, without a copy. Only for little-endian machines, because tensors are
//! little-endian on the wire.
#![allow(unsafe_code, reason = "one of the crate's unsafe parts")]

#[cfg(target_endian = "big")]
compile_error!("tensors are little-endian on the wire and are not swapped");

/// An element type without padding for which every bit pattern is valid.
///
/// # Safety
/// The type must have both properties.
pub(crate) unsafe trait Pod: Copy + Default + Send + 'static {}

macro_rules! pod {
    ($($type:ty)*) => {$(
        // SAFETY: a primitive number has no padding, and every bit pattern is a valid number.
        unsafe impl Pod for $type {}
    )*};
}
pod!(f32 i64 i32 i8 u8);

/// Returns the bytes of these elements.
pub(crate) fn bytes_of<T: Pod>(elements: &[T]) -> &[u8] {
    // SAFETY: Pod types have no padding, so every byte is initialised. u8 needs no alignment. The
    // length is the size of the same memory, which stays borrowed.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// Returns the bytes of these elements for writing.
pub(crate) fn bytes_of_mut<T: Pod>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`. Any written bytes are a valid T, and the memory is borrowed exclusively.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}

/// Returns these bytes as elements, or `None` if their start or length does not match the elements'
/// alignment or size.
pub(crate) fn elements_of<T: Pod>(bytes: &[u8]) -> Option<&[T]> {
    // SAFETY: every bit pattern is a valid T; the middle part of `align_to` is aligned and has whole
    // elements.
    let (before, elements, after) = unsafe { bytes.align_to::<T>() };
    (before.is_empty() && after.is_empty()).then_some(elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_and_bytes_are_the_same_memory() {
        let mut elements = [1.0f32, -2.5];
        assert_eq!(bytes_of(&elements), [1.0f32.to_le_bytes(), (-2.5f32).to_le_bytes()].concat());
        bytes_of_mut(&mut elements)[4..].copy_from_slice(&7.0f32.to_le_bytes());
        assert_eq!(elements, [1.0, 7.0]);
    }

    #[test]
    fn only_aligned_whole_elements_can_be_read_from_bytes() {
        let elements = [1.0f32, -2.5];
        let bytes = bytes_of(&elements);
        assert_eq!(elements_of::<f32>(bytes), Some(&elements[..]));
        assert_eq!(elements_of::<f32>(&bytes[1..5]), None);
        assert_eq!(elements_of::<f32>(&bytes[..6]), None);
        assert_eq!(elements_of::<u8>(&bytes[1..3]), Some(&bytes[1..3]));
    }
}
