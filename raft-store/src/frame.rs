//! The envelope of every record in sled: `format u8, crc32 u32 (little endian), body`. The checksum
//! also covers the format and the record's key, so that an intact record under the wrong key is
//! detected too.

/// Bytes that [`seal`] adds.
pub(crate) const ENVELOPE_BYTES: usize = 5;

/// The fault of stored bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RecordFault {
    /// The bytes are intact, but of another format.
    UnknownFormat { found: u32, known: u32 },
    /// The bytes are not those that were written.
    Damaged(String),
}

fn checksum(format: u8, key: &[u8], body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&[format]);
    hasher.update(key);
    hasher.update(body);
    hasher.finalize()
}

/// Wraps a body that is stored under `key`.
pub(crate) fn seal(format: u8, key: &[u8], body: &[u8]) -> Vec<u8> {
    let mut sealed = Vec::with_capacity(ENVELOPE_BYTES + body.len());
    sealed.push(format);
    sealed.extend(checksum(format, key, body).to_le_bytes());
    sealed.extend(body);
    sealed
}

/// Returns the body of a record stored under `key`, if the record is intact and of format `known`.
pub(crate) fn unseal<'a>(known: u8, key: &[u8], sealed: &'a [u8]) -> Result<&'a [u8], RecordFault> {
    let Some((&[format, a, b, c, d], body)) = sealed.split_first_chunk::<ENVELOPE_BYTES>() else {
        return Err(RecordFault::Damaged(format!("{} bytes are too few for a record", sealed.len())));
    };
    if u32::from_le_bytes([a, b, c, d]) != checksum(format, key, body) {
        return Err(RecordFault::Damaged("its checksum does not match".to_owned()));
    }
    if format != known {
        return Err(RecordFault::UnknownFormat { found: format.into(), known: known.into() });
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_body_is_unsealed_unchanged() {
        assert_eq!(unseal(1, b"key", &seal(1, b"key", b"body")), Ok(&b"body"[..]));
        assert_eq!(unseal(1, b"key", &seal(1, b"key", b"")), Ok(&b""[..]));
    }

    #[test]
    fn another_format_is_distinguished_from_damage() {
        let newer = seal(2, b"key", b"body");
        assert_eq!(unseal(1, b"key", &newer), Err(RecordFault::UnknownFormat { found: 2, known: 1 }));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_detected() {
        let sealed = seal(1, b"key", b"body");
        for bit in 0..sealed.len() * 8 {
            let mut flipped = sealed.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(unseal(1, b"key", &flipped), Err(RecordFault::Damaged(_))), "bit {bit}");
        }
        for len in 0..sealed.len() {
            assert!(matches!(unseal(1, b"key", &sealed[..len]), Err(RecordFault::Damaged(_))), "{len} bytes");
        }
    }

    #[test]
    fn a_record_under_another_key_is_detected() {
        assert!(matches!(unseal(1, b"kez", &seal(1, b"key", b"body")), Err(RecordFault::Damaged(_))));
    }
}
