//! How a schema's numbers are written as JSON, in the header of a batch file: ids as integers, and floating-point numbers as
//! strings, which hold all values exactly.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

fn parse<E: de::Error>(text: &str) -> Result<f64, E> {
    text.parse().map_err(|_| E::custom(format!("{text:?} is not a number")))
}

pub(crate) mod real {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
        format!("{value:?}").serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        parse(&String::deserialize(from)?)
    }
}

pub(crate) mod reals {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(values: &[f64], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(values.iter().map(|value| format!("{value:?}")))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
        Vec::<String>::deserialize(from)?.iter().map(|text| parse(text)).collect()
    }
}

pub(crate) mod source_id {
    use super::*;
    use millstream_fragment::SourceId;

    pub(crate) fn serialize<S: Serializer>(id: &SourceId, to: S) -> Result<S::Ok, S::Error> {
        id.0.serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SourceId, D::Error> {
        u32::deserialize(from).map(SourceId)
    }
}

pub(crate) mod source_ids {
    use super::*;
    use millstream_fragment::SourceId;

    pub(crate) fn serialize<S: Serializer>(ids: &[SourceId], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(ids.iter().map(|id| id.0))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<SourceId>, D::Error> {
        Ok(Vec::<u32>::deserialize(from)?.into_iter().map(SourceId).collect())
    }
}

pub(crate) mod source_kind {
    use super::*;
    use millstream_fragment::SourceKind;

    pub(crate) fn serialize<S: Serializer>(kind: &SourceKind, to: S) -> Result<S::Ok, S::Error> {
        kind.0.serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SourceKind, D::Error> {
        u32::deserialize(from).map(SourceKind)
    }
}
