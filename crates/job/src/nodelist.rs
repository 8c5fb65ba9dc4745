//! Slurm's compressed lists of hosts.

/// The first host of a list such as `gpu[03-07,12]-ib,login1`; `None` if the list is malformed.
pub(crate) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        if !rest[end..].starts_with('[') {
            break;
        }
        let (inside, after) = rest[end + 1..].split_once(']')?;
        // "03-07,12": the first number, with its leading zeros.
        let first = inside.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        host.push_str(first);
        rest = after;
    }
    let valid =
        !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    valid.then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, host) in [
            ("n1", Some("n1")),
            ("node7,node9", Some("node7")),
            ("n[1-4]", Some("n1")),
            ("gpu[03-07,12]-ib,login1", Some("gpu03-ib")),
            ("r[2,5]c[10-11]", Some("r2c10")),
            ("", None),
            ("n[1", None),
            ("n[-3]", None),
            ("a b", None),
            ("$(reboot)", None),
        ] {
            assert_eq!(first_host(list).as_deref(), host, "{list}");
        }
    }

    proptest! {
        #[test]
        fn no_list_panics(list in "[a-z0-9\\[\\],\\-.]{0,40}") {
            if let Some(host) = first_host(&list) {
                prop_assert!(!host.contains(['[', ',', ']']));
            }
        }
    }
}
