package graphopt;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Reads JSON: objects as maps, arrays as lists, numbers as Long or Double. */
final class Json {
    private static final int DEPTH = 32;
    private final String text, file;
    private int at, depth;

    private Json(String text, String file) {
        this.text = text;
        this.file = file;
    }

    static Object read(String text, String file) throws GraphoptException {
        Json json = new Json(text, file);
        Object value = json.value();
        if (json.next() != 0) throw json.refused();
        return value;
    }

    private GraphoptException refused() {
        return new GraphoptException(file + ": expected JSON, found other text at place " + at + ": write it with export_hosts again");
    }

    /** The next character that is no space; 0 at the end. */
    private char next() {
        while (at < text.length() && " \t\r\n".indexOf(text.charAt(at)) >= 0) at++;
        return at < text.length() ? text.charAt(at) : 0;
    }

    private boolean takes(char c) {
        boolean found = next() == c;
        if (found) at++;
        return found;
    }

    private Object value() throws GraphoptException {
        char c = next();
        if (++depth > DEPTH) throw refused();
        Object value = c == '{' ? object() : c == '[' ? array() : c == '"' ? string() : word();
        depth--;
        return value;
    }

    private Map<String, Object> object() throws GraphoptException {
        Map<String, Object> object = new LinkedHashMap<>();
        at++;
        if (takes('}')) return object;
        do {
            if (next() != '"') throw refused();
            String name = string();
            if (!takes(':')) throw refused();
            object.put(name, value());
        } while (takes(','));
        if (!takes('}')) throw refused();
        return object;
    }

    private List<Object> array() throws GraphoptException {
        List<Object> array = new ArrayList<>();
        at++;
        if (takes(']')) return array;
        do array.add(value()); while (takes(','));
        if (!takes(']')) throw refused();
        return array;
    }

    private String string() throws GraphoptException {
        StringBuilder string = new StringBuilder();
        for (at++; at < text.length(); at++) {
            char c = text.charAt(at);
            if (c == '"') {
                at++;
                return string.toString();
            }
            if (c == '\\' && ++at < text.length()) {
                int known = "bfnrt".indexOf(text.charAt(at));
                if (text.charAt(at) == 'u' && at + 4 < text.length()) {
                    try {
                        c = (char) Integer.parseInt(text.substring(at + 1, at + 5), 16);
                    } catch (NumberFormatException error) {
                        throw refused();
                    }
                    at += 4;
                } else c = known >= 0 ? "\b\f\n\r\t".charAt(known) : text.charAt(at);
            }
            string.append(c);
        }
        throw refused();
    }

    private Object word() throws GraphoptException {
        int begin = at;
        while (at < text.length() && ",:]} \t\r\n".indexOf(text.charAt(at)) < 0) at++;
        String word = text.substring(begin, at);
        switch (word) {
            case "null": return null;
            case "true": return true;
            case "false": return false;
            case "NaN": return Double.NaN;
            case "Infinity": return Double.POSITIVE_INFINITY;
            case "-Infinity": return Double.NEGATIVE_INFINITY;
            default:
        }
        try {
            return word.matches("-?\\d+") ? (Object) Long.valueOf(word) : (Object) Double.valueOf(word);
        } catch (NumberFormatException error) {
            throw refused();
        }
    }
}
