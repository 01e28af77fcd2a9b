//! How an event becomes a line.

use super::LINE;
use crate::output::json_text;
use serde_json::{Map, Value};
use std::fmt::{self, Debug};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;
use weightd_core::text::{cut, short};

/// For a person, the message says all that the fields say. On one line, whatever clients put into it.
#[derive(Debug)]
pub struct MessageOnly;

impl<'writer> FormatFields<'writer> for MessageOnly {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut message = Message(String::new());
        fields.record(&mut message);
        writer.write_str(&short(&message.0, LINE))
    }
}

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

/// One object a line, fields beside the message.
#[derive(Debug)]
pub struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Fields(Map::new());
        event.record(&mut fields);
        let metadata = event.metadata();
        writer.write_str(&line(*metadata.level(), metadata.target(), fields.0))
    }
}

/// A line that no event stands behind.
pub fn json_line(level: Level, target: &str, message: &str) -> String {
    let mut fields = Map::new();
    fields.insert("message".to_owned(), cut(message, LINE).into());
    line(level, target, fields)
}

fn line(level: Level, target: &str, mut object: Map<String, Value>) -> String {
    let mut timestamp = String::new();
    // A clock that cannot be read is no reason to lose the line.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    object.insert("timestamp".to_owned(), timestamp.into());
    object.insert("level".to_owned(), level.as_str().into());
    object.insert("target".to_owned(), target.into());
    json_text(&object.into()) + "\n"
}

struct Fields(Map<String, Value>);

impl Fields {
    fn insert(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.insert(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert(field, cut(value, LINE));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.insert(field, cut(&format!("{value:?}"), LINE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_no_event_stands_behind_is_cut_too() {
        let line = json_line(Level::ERROR, "weightd", &"ü\u{e0041}".repeat(LINE));
        let line: Value = serde_json::from_str(&line).unwrap();
        let message = line["message"].as_str().unwrap();
        assert!(
            message.starts_with("ü\u{e0041}ü") && message.len() <= LINE,
            "{line}"
        );
    }
}
