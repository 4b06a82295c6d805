// One JSON object a line on stdout.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <type_traits>

class Line {
public:
    explicit Line(const char* kind) { add("kind", std::string(kind)); }
    Line& add(const char* name, const std::string& text) {
        std::string quoted = "\"";
        for (const char letter : text) {
            if (letter == '"' || letter == '\\') {
                quoted += '\\';
            }
            quoted += static_cast<unsigned char>(letter) < 0x20 ? ' ' : letter;
        }
        return raw(name, quoted + '"');
    }
    Line& add(const char* name, const char* text) { return add(name, std::string(text)); }
    Line& add(const char* name, bool value) { return raw(name, value ? "true" : "false"); }
    Line& add(const char* name, double value) {
        char text[40];
        std::snprintf(text, sizeof text, "%.6g", std::isfinite(value) ? value : 0.0);
        return raw(name, text);
    }
    template <typename Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
    Line& add(const char* name, Integer value) {
        return raw(name, std::to_string(value));
    }
    // null where there is none.
    template <typename Value>
    Line& add(const char* name, const std::optional<Value>& value) {
        return value ? add(name, *value) : raw(name, "null");
    }
    void print() const {
        std::printf("%s}\n", text_.c_str());
        std::fflush(stdout);
    }

private:
    Line& raw(const char* name, const std::string& value) {
        text_ += text_.empty() ? "{\"" : ", \"";
        text_ += std::string(name) + "\": " + value;
        return *this;
    }
    std::string text_;
};
