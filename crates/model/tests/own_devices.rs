//! Devices that a site file defines.

use millstream_model::explain::{Flow, explain};
use millstream_model::sites::SHIPPED;
use millstream_model::sweep::apply;

fn text(site: &str) -> &'static str {
    SHIPPED.iter().find(|(name, _)| *name == site).unwrap().1
}

fn flow(text: &str) -> Flow {
    text.parse().unwrap()
}

#[test]
fn settings_of_a_sites_own_device_change_the_result() {
    let flow = flow("write node0 node1");
    let with = |point: &[(&str, &str)]| {
        let (site, p) = apply("own", text("roce100-cx5"), point).unwrap();
        explain(&site, &p, &flow, 0).unwrap()
    };
    let (before, after) = (with(&[]), with(&[("connectx-5-function.link.efficiency", "0.5")]));
    assert!(after.rate.0 < 0.6 * before.rate.0, "{} and {}", before.rate.0, after.rate.0);
    let names: Vec<&str> = before.sensitivities.iter().map(|s| s.name.as_str()).collect();
    assert!(names.contains(&"connectx-5-function.link.efficiency"), "{names:?}");
}

#[test]
fn a_card_without_a_value_is_an_error_that_names_it() {
    let own = "\n[device.own-card]\nkind = \"card\"\nnames = [\"Own card\"]\n";
    let text = text("recipe-baseline").replace("Alveo U280", "Own card") + own;
    let (site, p) = apply("own", &text, &[]).unwrap();
    let error = explain(&site, &p, &flow("write client server.u280"), 0).unwrap_err().to_string();
    assert!(error.contains("server.u280 is a \"Own card\"") && error.contains("[device.ID]"), "{error}");
}
