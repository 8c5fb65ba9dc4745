//! The subject of a certificate (RFC 5280, section 4.1).

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
/// Object identifier 2.5.4.3, with its tag and length.
const COMMON_NAME: [u8; 5] = [0x06, 0x03, 0x55, 0x04, 0x03];
/// Longest subject that is shown, in characters.
const MAX_SHOWN: usize = 64;

/// The common name of a certificate's subject. The certificate may be any bytes; nothing is verified.
#[must_use]
pub fn subject(certificate: &[u8]) -> String {
    let name = common_name(certificate).unwrap_or_default();
    let shown: String = String::from_utf8_lossy(name).escape_debug().take(MAX_SHOWN).collect();
    if shown.is_empty() { "(no common name)".to_owned() } else { shown }
}

/// The common name as the certificate holds it. Another text would be the name of another issuer.
pub(crate) fn common_name(certificate: &[u8]) -> Option<&[u8]> {
    let (SEQUENCE, name, _) = element(subject_and_rest(certificate)?)? else { return None };
    let at = name.windows(COMMON_NAME.len()).position(|window| window == COMMON_NAME)?;
    let (_, text, _) = element(&name[at + COMMON_NAME.len()..])?;
    Some(text)
}

/// The fields of a certificate from its subject on.
pub(crate) fn subject_and_rest(certificate: &[u8]) -> Option<&[u8]> {
    let (SEQUENCE, certificate, _) = element(certificate)? else { return None };
    let (SEQUENCE, mut fields, _) = element(certificate)? else { return None };
    if let (VERSION, _, rest) = element(fields)? {
        fields = rest;
    }
    // Serial number, signature algorithm, issuer, validity.
    for _ in 0..4 {
        fields = element(fields)?.2;
    }
    Some(fields)
}

/// The tag and the content of the first element, and the bytes behind it.
pub(crate) fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, length], rest) = bytes.split_first_chunk::<2>()?;
    let (length, rest) = match length {
        0..=0x7f => (usize::from(length), rest),
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
            (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_certificate_without_a_subject_is_described() {
        assert_eq!(subject(b""), "(no common name)");
        assert_eq!(subject(&[SEQUENCE, 0x84, 0xff, 0xff, 0xff, 0xff]), "(no common name)");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(subject(&bytes).chars().count() <= MAX_SHOWN);
        }

        #[test]
        fn elements_of_any_bytes_lie_inside_them(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some((_, content, rest)) = element(&bytes) {
                prop_assert!(content.len() + rest.len() + 2 <= bytes.len());
            }
        }
    }
}
