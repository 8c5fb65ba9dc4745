//! What Millstream's verbs programs share: device choice, connections, landing memory, waiting.
