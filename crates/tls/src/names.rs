//! The names of a certificate besides its subject (RFC 5280, section 4.2.1.6).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::subject::{element, subject_and_rest};

const EXTENSIONS: u8 = 0xa3;
const OCTET_STRING: u8 = 0x04;
const DNS_NAME: u8 = 0x82;
const IP_ADDRESS: u8 = 0x87;
/// Object identifier 2.5.29.17, with its tag and length.
const SUBJECT_ALTERNATIVE_NAME: [u8; 5] = [0x06, 0x03, 0x55, 0x1d, 0x11];

/// The names and addresses besides the subject that a certificate is valid for. The certificate may be any bytes; nothing is
/// verified.
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

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(bytes).map(Ipv4Addr::from).map(IpAddr::V4);
    let v6 = || <[u8; 16]>::try_from(bytes).map(Ipv6Addr::from).map(IpAddr::V6);
    v4().or_else(|_| v6()).ok()
}

/// Tags and contents of elements, up to the first invalid one.
fn elements(mut bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let (tag, content, rest) = element(bytes)?;
        bytes = rest;
        Some((tag, content))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = alternative_names(&bytes);
        }
    }
}
