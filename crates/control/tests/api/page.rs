//! The page in headless Chromium: states, rates, units, event display, commands with the token, keyboard, narrow screens.
//!
//! The tests are skipped, with the reason, where no Chromium is installed (Debian: chromium-headless-shell).

use crate::backend::Test;
use crate::browser::{Browser, program};
use millstream_control::machine::State;
use serde_json::json;
use std::path::Path;

const PICTURE: &str = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 800 600\">\
    <rect width=\"800\" height=\"600\" fill=\"#123\"/><circle cx=\"400\" cy=\"300\" r=\"200\" fill=\"#e84\"/></svg>";

/// A browser that shows the page of run control, which has the state `idle`.
fn open(test: &Test) -> Option<Browser> {
    let Some(program) = program() else {
        eprintln!("skipped: no Chromium is installed (Debian package chromium-headless-shell)");
        return None;
    };
    let mut browser = Browser::start(&program);
    browser.resize(1200, 900);
    browser.open(&format!("http://{}/", test.server.address()));
    browser.wait_for_text("#state", "idle");
    Some(browser)
}

fn is_enabled(browser: &mut Browser, command: &str) -> bool {
    browser.value(&format!("!document.querySelector('[data-command={command}]').disabled")) == json!(true)
}

/// Errors in the page without those that contain a text. There is no picture before the first stored event.
fn errors<'a>(browser: &'a Browser, expected: &str) -> Vec<&'a String> {
    let is_expected = |error: &&String| error.contains("/api/v1/display") || error.contains(expected);
    browser.errors.iter().filter(|error| !is_expected(error)).collect()
}

/// A run from the keyboard: each key is a command, and the page shows what run control does.
#[test]
fn a_run_is_operated_and_watched_from_the_keyboard() {
    let test = Test::with_units();
    let Some(mut browser) = open(&test) else { return };
    assert!(is_enabled(&mut browser, "configure") && !is_enabled(&mut browser, "stop"));

    // Without the token nothing is commanded, and the field for it gets the focus.
    browser.press("c");
    browser.wait_for_text("#answer", "Enter the token first");
    assert_eq!(browser.value("document.activeElement.id"), json!("token"));
    assert!(test.status().configuration.is_none());
    browser.write("wrong");
    // Keys in a field are text.
    browser.press("c");
    assert_eq!(browser.value("document.querySelector('#token').value"), json!("wrongc"));
    browser.press("Tab");
    browser.write("seen by a test");
    browser.press("Tab");
    assert_eq!(browser.value("document.activeElement.dataset.command"), json!("configure"));
    browser.press("Enter");
    browser.wait("document.querySelector('#answer').dataset.kind === 'error'");
    assert!(test.status().configuration.is_none());

    browser.value("document.querySelector('#token').value = ''; document.querySelector('#token').focus()");
    browser.write(test.token.as_str());
    browser.value("document.activeElement.blur()");
    browser.press("c");
    browser.wait_for_text("#state", "configured");
    browser.wait_for_text("#answer", "configure: done");
    assert_eq!(browser.text("#name"), "test");
    assert!(browser.text("#configuration").contains("run.toml"));

    browser.press("s");
    browser.wait_for_text("#state", "running");
    test.wait_for(State::Running);
    assert_eq!(browser.value("document.title"), json!("running – run control"));
    browser.wait_for_text("#run", "seen by a test");
    browser.wait("/[1-9][0-9,]* events\\/s/.test(document.querySelector('#run').innerText)");
    browser.wait("document.querySelector('#chart path') !== null");
    browser.wait("document.querySelectorAll('#units [data-state=running]').length === 3");
    assert!(browser.text("#units").contains("bu.0"));
    assert!(is_enabled(&mut browser, "pause") && is_enabled(&mut browser, "stop"));
    assert!(!is_enabled(&mut browser, "start") && !is_enabled(&mut browser, "configure"));

    // A builder unit's picture of a stored event.
    let output = output_of_run(&test);
    std::fs::write(millstream_control::display::file(&output, "bu.0"), PICTURE).unwrap();
    browser.wait(
        "!document.querySelector('#event').hidden && document.querySelector('#event').naturalWidth > 0",
    );
    browser.picture("running");

    browser.press("p");
    browser.wait_for_text("#state", "paused");
    browser.press("p");
    browser.wait_for_text("#state", "running");
    browser.press("x");
    browser.wait_for_text("#state", "configured");
    browser.wait_for_text("#log", "run 000001 ends: stopped");
    browser.wait_for_text("#run", "Last run");
    browser.picture("stopped");
    // The browser also reports the refused command.
    assert_eq!(errors(&browser, "403"), Vec::<&String>::new());
}

/// The output directory of the present run.
fn output_of_run(test: &Test) -> std::path::PathBuf {
    let output = test.folder.path().join("out/run-000001");
    std::fs::create_dir_all(&output).unwrap();
    output
}

/// A failed run, and text from outside: it is shown as text.
#[test]
fn faults_are_shown_and_markup_in_texts_is_text() {
    let test = Test::with_units();
    let Some(mut browser) = open(&test) else { return };
    test.succeed("configure", "");
    let markup = "<img src=x onerror=\"document.title='owned'\">";
    test.succeed("comment", &json!({ "comment": markup, "operator": "<b>o</b>" }).to_string());
    test.succeed("set", "{\"settings\":{\"run.batch\":13}}");
    test.succeed("start", &json!({ "comment": markup }).to_string());
    browser.wait_for_text("#state", "error");
    browser.wait_for_text("#faults", "the simulated run failed");
    browser.wait_for_text("#log", markup);
    assert_eq!(browser.value("document.querySelectorAll('#log img, #log b, #run img').length"), json!(0));
    assert!(is_enabled(&mut browser, "reset"));
    browser.picture("error");
    assert_eq!(errors(&browser, "no other"), Vec::<&String>::new());
}

/// At 320 CSS pixels (WCAG 2.2, 1.4.10) nothing needs sideways scrolling, and buttons can be hit with a finger.
#[test]
fn narrow_screens_show_everything() {
    let test = Test::with_units();
    let Some(mut browser) = open(&test) else { return };
    test.succeed("configure", "");
    test.succeed("start", "");
    browser.wait_for_text("#state", "running");
    std::fs::write(millstream_control::display::file(&output_of_run(&test), "bu.0"), PICTURE).unwrap();
    browser.wait("!document.querySelector('#event').hidden");
    for width in [320, 412, 768, 1200] {
        browser.resize(width, 800);
        browser.wait(&format!("window.innerWidth === {width}"));
        let overflow = browser.value("document.documentElement.scrollWidth - window.innerWidth");
        assert!(overflow.as_f64().unwrap() <= 0.0, "{width} px: {overflow} px too wide");
        let outside = "[...document.querySelectorAll('button, input, dd, li, img, h2')].filter((element) => {\
            const box = element.getBoundingClientRect();\
            return box.width > 0 && (box.left < 0 || box.right > window.innerWidth + 0.5);\
        }).map((element) => element.outerHTML)";
        assert_eq!(browser.value(outside), json!([]), "{width} px");
        let small = "[...document.querySelectorAll('button')].map((button) => button.getBoundingClientRect().height)\
            .filter((height) => height < 44).length";
        assert_eq!(browser.value(small), json!(0), "{width} px");
        browser.picture(&format!("width-{width}"));
    }
    // All fields and buttons have a name for screen readers.
    let unnamed = "[...document.querySelectorAll('input')].filter((input) => !input.labels.length).length + \
        [...document.querySelectorAll('button')].filter((button) => !button.innerText.trim()).length + \
        [...document.querySelectorAll('img, svg')].filter((image) => !image.alt && \
            !image.getAttribute('aria-labelledby')).length";
    assert_eq!(browser.value(unnamed), json!(0));
    test.succeed("stop", "");
    assert_eq!(errors(&browser, "no other"), Vec::<&String>::new());
}

/// The page says that its values are old when run control ends.
#[test]
fn a_lost_connection_is_shown() {
    let test = Test::new();
    let Some(mut browser) = open(&test) else { return };
    let Test { server, folder, .. } = test;
    drop(server);
    assert!(Path::new(folder.path()).exists());
    browser.wait("!document.querySelector('#connection').hidden");
    assert!(browser.text("#connection").contains("Connection lost"));
    browser.picture("connection-lost");
}
