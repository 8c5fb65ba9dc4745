//! A headless Chromium, over the DevTools protocol on a pipe.

use crate::backend::BOUND;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Names of the program.
const PROGRAMS: [&str; 4] = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];

/// The browser that is installed.
pub(crate) fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let candidates = PROGRAMS.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    candidates.into_iter().find(|path| path.is_file())
}

/// A browser with one page.
pub(crate) struct Browser {
    process: Child,
    commands: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    sent: u64,
    /// Errors of the page's scripts, and requests that failed.
    pub(crate) errors: Vec<String>,
    _profile: tempfile::TempDir,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Browser {
    /// Starts the browser, with an empty page.
    pub(crate) fn start(program: &PathBuf) -> Browser {
        let profile = tempfile::tempdir().unwrap();
        // The protocol's pipes are the descriptors 3 and 4.
        let mut process = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 0</dev/null 1>/dev/null 2>/dev/null", "sh"])
            .arg(program)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (commands, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(output).split(0).map_while(Result::ok) {
                if let Ok(message) = serde_json::from_slice(&message)
                    && sender.send(message).is_err()
                {
                    return;
                }
            }
        });
        let mut browser = Browser {
            process,
            commands,
            messages,
            session: None,
            sent: 0,
            errors: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }));
        let target = &target["targetId"];
        let attached = browser.call("Target.attachToTarget", &json!({ "targetId": target, "flatten": true }));
        browser.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        browser
    }

    /// Calls a method of the protocol.
    pub(crate) fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.sent += 1;
        let mut message = json!({ "id": self.sent, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message).unwrap();
        bytes.push(0);
        self.commands.write_all(&bytes).unwrap();
        let until = Instant::now() + BOUND;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.messages.recv_timeout(left) {
                Ok(message) if message["id"] == json!(self.sent) => {
                    assert!(message["error"].is_null(), "{method}: {message}");
                    return message["result"].clone();
                }
                Ok(message) => self.note(&message),
                Err(RecvTimeoutError::Timeout) => panic!("{method}: no answer within {BOUND:?}"),
                Err(RecvTimeoutError::Disconnected) => panic!("{method}: the browser has ended"),
            }
        }
    }

    fn note(&mut self, message: &Value) {
        let parameters = &message["params"];
        let is_error = match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Log.entryAdded") => parameters["entry"]["level"] == "error",
            Some("Runtime.consoleAPICalled") => parameters["type"] == "error",
            _ => false,
        };
        if is_error {
            self.errors.push(parameters.to_string());
        }
    }

    /// Loads a page.
    pub(crate) fn open(&mut self, address: &str) {
        let loaded = self.call("Page.navigate", &json!({ "url": address }));
        assert!(loaded["errorText"].is_null(), "{loaded}");
    }

    /// The value of an expression in the page.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let answer =
            self.call("Runtime.evaluate", &json!({ "expression": expression, "returnByValue": true }));
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// The text of an element.
    pub(crate) fn text(&mut self, selector: &str) -> String {
        let value = self.value(&format!("document.querySelector({selector:?}).innerText"));
        value.as_str().unwrap_or_else(|| panic!("{selector}: {value}")).to_owned()
    }

    /// Waits until an expression is true.
    pub(crate) fn wait(&mut self, expression: &str) {
        let until = Instant::now() + BOUND;
        while self.value(expression) != json!(true) {
            assert!(Instant::now() < until, "{expression}\n{}", self.text("body"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for the text of an element.
    pub(crate) fn wait_for_text(&mut self, selector: &str, text: &str) {
        self.wait(&format!("document.querySelector({selector:?})?.innerText.includes({text:?}) === true"));
    }

    /// Presses a key.
    pub(crate) fn press(&mut self, key: &str) {
        let (text, code) = match key {
            "Enter" => (Some("\r"), 13),
            "Tab" => (None, 9),
            key => (Some(key), u32::from(key.as_bytes()[0].to_ascii_uppercase())),
        };
        let mut down = json!({ "type": "keyDown", "key": key, "windowsVirtualKeyCode": code });
        if let Some(text) = text {
            down["text"] = json!(text);
        }
        self.call("Input.dispatchKeyEvent", &down);
        let up = json!({ "type": "keyUp", "key": key, "windowsVirtualKeyCode": code });
        self.call("Input.dispatchKeyEvent", &up);
    }

    /// Types into the element that has the focus.
    pub(crate) fn write(&mut self, text: &str) {
        self.call("Input.insertText", &json!({ "text": text }));
    }

    /// Sets the size of the window, in CSS pixels.
    pub(crate) fn resize(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", &size);
    }

    /// Saves a picture of the whole page in the folder `MILLSTREAM_SCREENSHOTS`, if that is set.
    pub(crate) fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("MILLSTREAM_SCREENSHOTS") else { return };
        let picture = self.call("Page.captureScreenshot", &json!({ "captureBeyondViewport": true }));
        let encoded = picture["data"].as_str().unwrap();
        let path = PathBuf::from(folder).join(format!("{name}.png"));
        std::fs::write(&path, decode_base64(encoded)).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    }
}

/// Decodes standard base64.
fn decode_base64(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text
        .bytes()
        .filter_map(|byte| match byte {
            b'A'..=b'Z' => Some(byte - b'A'),
            b'a'..=b'z' => Some(byte - b'a' + 26),
            b'0'..=b'9' => Some(byte - b'0' + 52),
            b'+' => Some(62),
            b'/' => Some(63),
            _ => None,
        })
        .map(u32::from)
        .collect();
    let group = |four: &[u32]| {
        let word = four.iter().fold(0, |word, digit| word << 6 | digit) << (6 * (4 - four.len()));
        word.to_be_bytes()[1..four.len()].to_vec()
    };
    digits.chunks(4).flat_map(group).collect()
}

#[test]
fn base64_is_decoded() {
    let cases: [(&str, &[u8]); 4] = [("", b""), ("TQ==", b"M"), ("TWE=", b"Ma"), ("TWFu/w==", b"Man\xff")];
    for (text, bytes) in cases {
        assert_eq!(decode_base64(text), bytes, "{text}");
    }
}
