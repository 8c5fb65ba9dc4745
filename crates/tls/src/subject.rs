//! The subject of a certificate, and its other names (RFC 5280, sections 4.1 and 4.2.1.6).

#[cfg(feature = "authority")]
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
#[cfg(feature = "authority")]
const EXTENSIONS: u8 = 0xa3;
#[cfg(feature = "authority")]
const OCTET_STRING: u8 = 0x04;
#[cfg(feature = "authority")]
const DNS_NAME: u8 = 0x82;
#[cfg(feature = "authority")]
const IP_ADDRESS: u8 = 0x87;
/// Object identifier 2.5.4.3, with its tag and length.
const COMMON_NAME: [u8; 5] = [0x06, 0x03, 0x55, 0x04, 0x03];
/// Object identifier 2.5.29.17, with its tag and length.
#[cfg(feature = "authority")]
const SUBJECT_ALTERNATIVE_NAME: [u8; 5] = [0x06, 0x03, 0x55, 0x1d, 0x11];
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

/// The names and addresses besides the subject that a certificate is valid for. The certificate may be any bytes; nothing is
/// verified.
#[cfg(feature = "authority")]
pub(crate) fn alternative_names(certificate: &[u8]) -> Option<Vec<String>> {
    // Behind the subject: the public key; and the extensions, of which there may be none.
    let mut rest = element(subject_and_rest(certificate)?)?.2;
    let extensions = loop {
        match element(rest) {
            Some((EXTENSIONS, content, _)) => break element(content)?.1,
            Some((_, _, behind)) => rest = behind,
            None => return Some(Vec::new()),
        }
    };
    let mut names = Vec::new();
    for (_, extension) in elements(extensions) {
        let Some(content) = extension.strip_prefix(&SUBJECT_ALTERNATIVE_NAME) else { continue };
        // It may be marked as critical before its value.
        let (_, value) = elements(content).find(|(tag, _)| *tag == OCTET_STRING)?;
        names.extend(elements(element(value)?.1).filter_map(|(tag, name)| match tag {
            DNS_NAME => String::from_utf8(name.to_vec()).ok(),
            IP_ADDRESS => address(name).map(|address| address.to_string()),
            _ => None,
        }));
    }
    Some(names)
}

#[cfg(feature = "authority")]
fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(bytes).map(Ipv4Addr::from).map(IpAddr::V4);
    let v6 = || <[u8; 16]>::try_from(bytes).map(Ipv6Addr::from).map(IpAddr::V6);
    v4().or_else(|_| v6()).ok()
}

/// The fields of a certificate from its subject on.
fn subject_and_rest(certificate: &[u8]) -> Option<&[u8]> {
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

/// Tags and contents of elements, up to the first invalid one.
#[cfg(feature = "authority")]
fn elements(mut bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let (tag, content, rest) = element(bytes)?;
        bytes = rest;
        Some((tag, content))
    })
}

/// The tag and the content of the first element, and the bytes behind it.
fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
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
            let _ = alternative_names(&bytes);
        }

        #[test]
        fn elements_of_any_bytes_lie_inside_them(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some((_, content, rest)) = element(&bytes) {
                prop_assert!(content.len() + rest.len() + 2 <= bytes.len());
            }
        }
    }
}
